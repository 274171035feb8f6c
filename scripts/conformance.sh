#!/bin/sh
# The official MCP conformance suite over HTTP, for both protocol eras, against the product (what applies to any server)
# and against the test-only application on the same server (everything). Ends with 1 on a failure that is not expected.
#
#   scripts/conformance.sh NPM     NPM: a folder where scripts/npm/package.json is installed
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
npm=$(realpath "$1")
python="$root/.venv/bin/python"
node="$npm/node_modules/node/bin/node"
suite="$npm/node_modules/@modelcontextprotocol/conformance"
expected="$root/tests/conformance/expected-failures.yaml"
any_2025="server-initialize ping completion-complete tools-list server-sse-multiple-streams resources-list prompts-list \
dns-rebinding-protection server-session-lifecycle"
any_2026="server-stateless completion-complete tools-list server-sse-multiple-streams resources-list sep-2164-resource-not-found prompts-list \
dns-rebinding-protection caching input-required-result-unsupported-methods http-header-validation"

folder=$(mktemp -d)
servers=""
finish() { for one in $servers; do kill "$one" 2>/dev/null || true; done; wait; rm -rf "$folder"; }
trap finish EXIT
trap 'exit 130' INT TERM
mkdir "$folder/workspace"
export FLASHRT_LEASE_DIR="$folder/leases"
cd "$root"

start() { # name, command...: starts a server on a free port, and waits until it answers
  name=$1; shift
  port=$("$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
  "$@" --http "127.0.0.1:$port" --workspace "$folder/workspace" >"$folder/$name.log" 2>&1 &
  servers="$servers $!"
  url="http://127.0.0.1:$port/mcp"
  tries=0
  until "$python" -c "import socket; socket.create_connection(('127.0.0.1', $port), 1)" 2>/dev/null; do
    tries=$((tries + 1))
    if [ $tries -gt 100 ] || ! kill -0 $! 2>/dev/null; then cat "$folder/$name.log"; exit 1; fi
    sleep 0.2
  done
}
run() { # folder of results, arguments of the suite...
  out=$1; shift
  # Its own exit status counts what no revision requires: the table below judges.
  "$node" "$suite/dist/index.js" server --url "$url" -o "$folder/$out" "$@" >>"$folder/$out.log" 2>&1 || true
}

start product "$root/.venv/bin/flashrt" serve
for scenario in $any_2025; do run product-2025-11-25 --spec-version 2025-11-25 --scenario "$scenario"; done
for scenario in $any_2026; do run product-2026-07-28 --spec-version 2026-07-28 --scenario "$scenario"; done
start fixture "$python" -m tests.conformance.fixture
for revision in 2025-11-25 2026-07-28; do run "fixture-$revision" --requirements "$revision"; done

table() { "$python" "$root/scripts/conformance_table.py" "$expected" "${1%%-*}" "$folder/$1" "$2"; }
failed=0
table product-2025-11-25 "$any_2025" || failed=1
table product-2026-07-28 "$any_2026" || failed=1
for revision in 2025-11-25 2026-07-28; do
  table "fixture-$revision" "$suite/requirements/$revision.yaml" || failed=1
done
[ $failed = 0 ] || { echo "what the servers said:"; tail -n 30 "$folder/product.log" "$folder/fixture.log"; }
exit $failed
