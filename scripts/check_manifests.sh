#!/bin/sh
# Skills, plugin, manifests and tool schemas, each by its own validator; ends with 1 when one of them refuses.
#
#   scripts/check_manifests.sh NPM [FLASHRT]     NPM: a folder where scripts/npm/package.json is installed
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
npm=$(realpath "$1")
flashrt=$(realpath "${2:-$root/.venv/bin/flashrt}")
node="$npm/node_modules/node/bin/node"
PATH="$npm/node_modules/.bin:$PATH"
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
# The clients write to their home folder, even to validate.
export HOME="$folder"
failed=0
check() { # name, command...
  name=$1; shift
  if "$@" >"$folder/out" 2>&1; then echo "ok    $name"
  else echo "FAIL  $name"; cat "$folder/out"; failed=1; fi
}

for skill in "$root"/skills/*/SKILL.md; do
  skill=$(dirname "$skill")
  check "skills-ref: $(basename "$skill")" skills-ref validate "$skill"
done
check "claude plugin validate --strict: marketplace" claude plugin validate --strict "$root"
check "claude plugin validate --strict: plugin" claude plugin validate --strict "$root/.claude-plugin/plugin.json"
check "mcpb validate" mcpb validate "$root/clients/mcpb/manifest.json"
mkdir "$folder/workspace"
strict() {
  "$node" "$npm/node_modules/.bin/mcp-inspector" --cli "$flashrt" serve --workspace "$folder/workspace" \
    --method tools/list --strict >"$folder/tools.json" 2>"$folder/said" || { cat "$folder/said"; return 1; }
  if grep -q "[1-9][0-9]* warning" "$folder/said"; then cat "$folder/said"; return 1; fi
}
check "inspector --strict: tool schemas" strict
"$node" "$root/scripts/count_tokens.mjs" "$npm" "$folder/tools.json" || failed=1
exit $failed
