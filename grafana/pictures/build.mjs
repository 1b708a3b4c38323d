/** Bundles the page into dist/. */

import { cp, rm } from 'node:fs/promises';

import { build } from 'esbuild';

// Editors, maps and telemetry, which Grafana's components import and no panel drawn here opens; package.json installs
// an empty package in their places.
const UNUSED = /^(@grafana\/faro-web-sdk|@monaco-editor\/react|monaco-editor|ol)(\/|$)/;

const unused = {
  name: 'unused',
  setup({ onResolve, onLoad }) {
    onResolve({ filter: UNUSED }, ({ path }) => ({ path, namespace: 'unused' }));
    onLoad({ filter: /.*/, namespace: 'unused' }, () => ({ contents: 'module.exports = {};' }));
  },
};

// Their CommonJS builds: the others' default imports of CommonJS packages mean something else to Node and to bundlers.
const COMMON = ['data', 'schema', 'ui'].map((name) => [
  `@grafana/${name}`,
  `./node_modules/@grafana/${name}/dist/cjs/index.cjs`,
]);

await rm('dist', { recursive: true, force: true });
await build({
  entryPoints: ['src/main.jsx'],
  bundle: true,
  outdir: 'dist',
  jsx: 'automatic',
  target: 'es2022',
  define: { global: 'globalThis', 'process.env.NODE_ENV': '"production"' },
  loader: { '.woff': 'empty', '.woff2': 'file' },
  logLevel: 'warning',
  alias: Object.fromEntries(COMMON),
  plugins: [unused],
});
await cp('index.html', 'dist/index.html');
