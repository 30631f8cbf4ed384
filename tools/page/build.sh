#!/usr/bin/env bash
# Copies Observable Plot and d3 from npm into the package, with the licence of every module that their files contain.
# package-lock.json pins each by its checksum: `npm ci` refuses anything else. Needs node and npm; run it after a change
# of package.json (then first `npm install --omit-lockfile-registry-resolved` here), and commit what it writes.
set -euo pipefail
cd "$(dirname "$0")"
target="$PWD/../../src/protofed/reports/page/assets/vendor"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
cp package.json package-lock.json "$work"
cd "$work"
npm ci --ignore-scripts --no-audit --no-fund --silent
mkdir -p "$target"
cp node_modules/d3/dist/d3.min.js node_modules/@observablehq/plot/dist/plot.umd.min.js "$target"
node -e '
const fs = require("fs"), path = require("path");
const folders = Object.keys(JSON.parse(fs.readFileSync("package-lock.json")).packages).filter(Boolean).sort();
const parts = ["Licences of Observable Plot, d3 and the modules that their files contain.\n"];
for (const folder of folders) {
  const facts = JSON.parse(fs.readFileSync(path.join(folder, "package.json")));
  const file = fs.readdirSync(folder).find((name) => /^licen[cs]e/i.test(name));
  if (!file) throw new Error(`${folder} has no licence`);
  parts.push(`${"=".repeat(78)}\n${facts.name} ${facts.version} (${facts.license})\n\n${fs.readFileSync(path.join(folder, file), "utf8").trim()}\n`);
}
fs.writeFileSync(process.argv[1], parts.join("\n"));
' "$target/LICENSES.txt"
wc -c "$target"/*
