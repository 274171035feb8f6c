// How much of an agent's context the list of tools takes.
//   node scripts/count_tokens.mjs NPM TOOLS.json      NPM: where scripts/npm/package.json is installed
import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const MAX_TOOLS = 24;
const MAX_TOKENS = 10000;
const [npm, path] = process.argv.slice(2);
const encoding = pathToFileURL(`${npm}/node_modules/gpt-tokenizer/esm/encoding/o200k_base.js`);
const { encode } = await import(encoding);
const { tools } = JSON.parse(readFileSync(path));
const tokens = encode(JSON.stringify(tools)).length;
const fits = tools.length <= MAX_TOOLS && tokens <= MAX_TOKENS;
console.log(
  `${fits ? "ok   " : "FAIL "} ${tools.length} tools (at most ${MAX_TOOLS}), ${tokens} schema tokens by o200k_base (at most ${MAX_TOKENS})`,
);
process.exit(fits ? 0 : 1);
