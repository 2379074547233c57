// Write the files that the wheel carries. The same sources give the same bytes: `nox -s view` checks it.
import { build } from "esbuild";
import { copyFileSync } from "node:fs";

const out = new URL("../src/lightning_trainer/kits/view/static/", import.meta.url).pathname;
await build({
  entryPoints: { app: "src/app.tsx" },
  bundle: true,
  minify: true,
  format: "esm",
  target: "es2022",
  jsx: "automatic",
  jsxImportSource: "preact",
  charset: "ascii",
  legalComments: "eof",
  outdir: out,
});
copyFileSync("src/index.html", `${out}index.html`);
