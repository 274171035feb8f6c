#!/bin/sh
# Does FlashRT work in the agents' own clients? Lists its tools and skills through Claude Code and Codex, and tools, prompts
# and resources through the Inspector, with a home folder of their own and without an account. Not part of the tests: it wants
# npm and its registry.
#
#   scripts/check_clients.sh [FLASHRT]     FLASHRT: the installed command (default: .venv/bin/flashrt)
#   NPM=build/npm scripts/check_clients.sh     with a folder where scripts/npm/package.json is installed already
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
flashrt=$(realpath "${1:-$root/.venv/bin/flashrt}")
command -v npm >/dev/null || { echo "npm is not here: install Node.js 20 or newer, then run this again"; exit 1; }
codex_version=0.171.0

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
npm=$(realpath -m "${NPM:-$root/build/npm}")
if [ ! -e "$npm/.installed" ]; then
  npm="$folder/npm"
  mkdir "$npm"
  cp "$root/scripts/npm/package.json" "$npm/"
  npm install --silent --no-audit --no-fund --no-package-lock --prefix "$npm"
fi
if ! command -v codex >/dev/null; then
  mkdir "$folder/codex"
  npm install --silent --no-audit --no-fund --prefix "$folder/codex" "@openai/codex@$codex_version"
fi
export HOME="$folder/home" PYTHONDONTWRITEBYTECODE=1
mkdir -p "$HOME"
workspace="$folder/workspace"
cp -r "$root/tests/toy" "$workspace"
PATH="$npm/node_modules/.bin:$folder/codex/node_modules/.bin:$(dirname "$flashrt"):$PATH"
cd "$workspace"
skills=$(for one in "$root"/skills/*/SKILL.md; do basename "$(dirname "$one")"; done | tr '\n' ' ')
failed=0
report() { # name, what was seen, what must be in it
  if printf '%s\n' "$2" | grep -q "$3"; then printf 'ok    %s: %s\n' "$1" "$(printf '%s\n' "$2" | grep -m1 "$3" | cut -c1-150)"
  else echo "FAIL  $1: no '$3' in:"; printf '%s\n' "$2"; failed=1; fi
}
report_all() { # name, what was seen, words that must all be in it
  missing=""
  for word in $3; do printf '%s\n' "$2" | grep -q -- "$word" || missing="$missing $word"; done
  if [ -z "$missing" ]; then echo "ok    $1: $3"
  else echo "FAIL  $1: no$missing in:"; printf '%s\n' "$2" | cut -c1-300; failed=1; fi
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
rm -r .mcp.json .claude
# The marketplace without what is no part of it: a checkout's environment and build outputs are large.
mkdir "$folder/market"
(cd "$root" && cp -r .claude-plugin .mcp.json skills "$folder/market/")
report "claude plugin marketplace add" "$(claude plugin marketplace add "$folder/market" 2>&1)" 'flashrt'
report "claude plugin install" "$(claude plugin install flashrt@flashrt 2>&1)" 'flashrt'
report "claude plugin list" "$(claude plugin list 2>&1)" 'flashrt@flashrt'
report "claude plugin, its server" "$(claude mcp list 2>&1)" 'flashrt.*Connected'
installed=$(find "$HOME/.claude/plugins" -path '*flashrt*/skills/*/SKILL.md' 2>/dev/null || true)
report_all "claude plugin, skills installed" "$installed" "$skills"
report_all "claude plugin details" "$(claude plugin details flashrt@flashrt 2>&1)" "$skills"

echo "$(codex --version 2>/dev/null)"
mkdir -p "$HOME/.codex"
cat >"$HOME/.codex/config.toml" <<EOF
[mcp_servers.flashrt]
command = "$flashrt"
args = ["serve", "--workspace", "$workspace"]
EOF
mkdir -p "$workspace/.codex/skills"
cp -r "$root"/skills/* "$workspace/.codex/skills/"
report "codex mcp list" "$(codex mcp list 2>&1)" 'flashrt .*enabled'
# `codex mcp list` shows the configuration; its app server connects, and lists tools and skills without an account.
seen=$(python3 "$root/scripts/list_codex_tools.py")
report "codex app-server, mcpServerStatus/list" "$seen" 'flashrt: .*ir_build'
report_all "codex app-server, skills/list" "$(printf '%s\n' "$seen" | grep '^skills:')" "$skills"

echo "MCP Inspector"
inspect() { mcp-inspector --cli "$flashrt" serve --workspace "$workspace" "$@" 2>&1; }
report "inspector, tools/list" "$(inspect --method tools/list)" '"name": "ir_build"'
report "inspector, tools/call ir_build" \
  "$(inspect --method tools/call --tool-name ir_build --tool-arg document=program.yaml)" '"program": "prog-'
report_all "inspector, prompts/list" "$(inspect --method prompts/list)" "$skills"
report "inspector, prompts/get" \
  "$(inspect --method prompts/get --prompt-name measure --prompt-args system=reference.py:serve)" 'system: reference.py:serve'
listed=$(inspect --method resources/list)
report "inspector, resources/list" "$listed" 'program://prog-'
uri=$(printf '%s\n' "$listed" | sed -n 's/.*"\(program:[^"]*\)".*/\1/p' | head -n 1)
report "inspector, resources/read $uri" "$(inspect --method resources/read --uri "$uri")" 'flashrt/program@1'
report_all "inspector, resources/templates/list" "$(inspect --method resources/templates/list)" \
  'program://{id} run://{id} variant://{id} job://{id}'
exit $failed
