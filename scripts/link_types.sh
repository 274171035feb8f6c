#!/bin/sh
# A tree of links that looks as the installed package does, for tools that read source instead of importing.
set -eu
cd "$(dirname "$0")/.."
rm -rf build/types && mkdir -p build/types/flashrt
for entry in tools/*; do
  case "$entry" in *__pycache__*) ;; *) ln -s "../../../$entry" "build/types/flashrt/$(basename "$entry")" ;; esac
done
for package in mcp_server apps skills; do ln -s "../../../$package" "build/types/flashrt/$package"; done
