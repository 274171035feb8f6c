#!/bin/sh
# Does the server work in the agents' own clients? Lists its tools through Claude Code, Codex and the Inspector, from npm,
# with a home folder of their own and without an account. Not part of the tests: it wants npm and its registry.
#
#   scripts/check_clients.sh [FLASHRT]     FLASHRT: the installed command (default: .venv/bin/flashrt)
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
flashrt=$(realpath "${1:-$root/.venv/bin/flashrt}")
command -v npm >/dev/null || { echo "npm is not here: install Node.js 20 or newer, then run this again"; exit 1; }

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export HOME="$folder/home" PYTHONDONTWRITEBYTECODE=1
mkdir -p "$HOME" "$folder/npm"
workspace="$folder/workspace"
cp -r "$root/tests/toy" "$workspace"
npm install --silent --no-audit --no-fund --prefix "$folder/npm" \
  @anthropic-ai/claude-code @openai/codex @modelcontextprotocol/inspector
PATH="$folder/npm/node_modules/.bin:$PATH"
cd "$workspace"
failed=0
report() { # name, what was seen, what must be in it
  if printf '%s\n' "$2" | grep -q "$3"; then echo "ok    $1: $(printf '%s\n' "$2" | grep -m1 "$3")"
  else echo "FAIL  $1: no '$3' in:"; printf '%s\n' "$2"; failed=1; fi
}

echo "Claude Code $(claude --version)"
claude mcp add flashrt -- "$flashrt" serve --workspace "$workspace" >/dev/null
report "claude mcp add, claude mcp list" "$(claude mcp list 2>&1)" 'flashrt: .*Connected'
claude mcp remove flashrt >/dev/null
# A project's .mcp.json is asked about first; this setting answers for the repository.
git init --quiet
cat >.mcp.json <<EOF
{"mcpServers": {"flashrt": {"command": "$flashrt", "args": ["serve", "--workspace", "."]}}}
EOF
mkdir -p .claude
echo '{"enableAllProjectMcpServers": true}' >.claude/settings.local.json
report "claude, .mcp.json of the project" "$(claude mcp list 2>&1)" 'flashrt: .*Connected'

echo "$(codex --version 2>/dev/null)"
mkdir -p "$HOME/.codex"
cat >"$HOME/.codex/config.toml" <<EOF
[mcp_servers.flashrt]
command = "$flashrt"
args = ["serve", "--workspace", "$workspace"]
EOF
report "codex mcp list" "$(codex mcp list 2>&1)" 'flashrt .*enabled'
# `codex mcp list` shows the configuration; its app server connects, and lists the tools without an account.
report "codex app-server, mcpServerStatus/list" "$(python3 "$root/scripts/list_codex_tools.py")" 'flashrt: .*ir_build'

echo "MCP Inspector"
inspect() { mcp-inspector --cli "$flashrt" serve --workspace "$workspace" "$@" 2>&1; }
report "inspector, tools/list" "$(inspect --method tools/list)" '"name": "ir_build"'
report "inspector, tools/call ir_build" \
  "$(inspect --method tools/call --tool-name ir_build --tool-arg document=program.yaml)" '"program": "prog-'
exit $failed
