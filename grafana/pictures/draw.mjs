/**
 * Draws dashboards from a running Prometheus: one PNG each, and on standard output one line of JSON for each panel:
 * its dashboard, title and type, its state (data, empty or error; the last two with their reason), and its ink, the
 * share of it below the title that is not background.
 *
 *     node draw.mjs --prometheus http://localhost:9090 --chromium PATH --out FOLDER [options] DASHBOARD.json...
 *
 * `--minutes N` before now (60), `--scrape SECONDS` between scrapes (15), `--theme dark|light`, `--width PIXELS`
 * (1400), `--colours N` in a picture (128), `--var NAME=VALUE` any number of times. Needs `npm run build`. Exit status:
 * 0 all dashboards are drawn, whatever their panels hold; 1 one is not; 2 something is not given.
 */

import { mkdir, readFile, writeFile } from 'node:fs/promises';
import { createServer, request } from 'node:http';
import { basename, extname, join } from 'node:path';
import { parseArgs } from 'node:util';

import { chromium } from 'playwright-core';
import UPNG from 'upng-js';

const BUILT = join(import.meta.dirname, 'dist');
const ICONS = join(import.meta.dirname, 'node_modules/@grafana/ui/dist/public/img/icons');
const LOOPBACK = '127.0.0.1';
const DRAW_MILLISECONDS = 120_000;
const [TITLE, BORDER] = [34, 3];
const FLAGS = ['--disable-gpu', '--disable-quic', '--disable-sync', '--disable-dev-shm-usage'];
const TYPES = {
  '.css': 'text/css',
  '.html': 'text/html',
  '.js': 'text/javascript',
  '.json': 'application/json',
  '.svg': 'image/svg+xml',
  '.woff2': 'font/woff2',
};

const USAGE =
  'node draw.mjs --prometheus URL --chromium PATH --out FOLDER [--minutes N] [--scrape SECONDS] [--theme dark|light]' +
  ' [--width PIXELS] [--colours N] [--var NAME=VALUE]... DASHBOARD.json...';

const { values: options, positionals: dashboards } = parseArgs({
  allowPositionals: true,
  options: {
    prometheus: { type: 'string' },
    chromium: { type: 'string' },
    out: { type: 'string' },
    minutes: { type: 'string', default: '60' },
    scrape: { type: 'string', default: '15' },
    theme: { type: 'string', default: 'dark' },
    width: { type: 'string', default: '1400' },
    colours: { type: 'string', default: '128' },
    var: { type: 'string', multiple: true, default: [] },
    help: { type: 'boolean', default: false },
  },
});

const { help, prometheus, chromium: binary, out } = options;
if (help || !(prometheus && binary && out && dashboards.length)) {
  console.error(USAGE);
  process.exit(help ? 0 : 2);
}

/** The built page, the dashboards below /dashboards and, so that all has one origin, Prometheus below /api. */
function serve() {
  const server = createServer(async (asked, answer) => {
    const path = decodeURIComponent(new URL(asked.url, 'http://page').pathname);
    if (path.startsWith('/api/')) {
      return forward(asked, answer);
    }
    const file = fileAt(path);
    try {
      const content = await readFile(file);
      answer.writeHead(200, { 'Content-Type': TYPES[extname(file)] ?? 'application/octet-stream' }).end(content);
    } catch {
      answer.writeHead(404).end();
    }
  });
  return new Promise((done) => server.listen(0, LOOPBACK, () => done(server)));
}

function fileAt(path) {
  if (path.includes('/img/icons/')) {
    return join(ICONS, path.split('/img/icons/')[1]);
  }
  const dashboard = dashboards.find((name) => path === `/dashboards/${basename(name)}`);
  return dashboard ?? join(BUILT, path === '/' ? 'index.html' : path);
}

function forward(asked, answer) {
  const passed = request(new URL(asked.url, prometheus), (given) => {
    answer.writeHead(given.statusCode, given.headers);
    given.pipe(answer);
  });
  passed.on('error', (error) => answer.writeHead(502).end(JSON.stringify({ status: 'error', error: String(error) })));
  passed.end();
}

function address(port, file) {
  const variables = options.var.map((given) => given.split(/=(.*)/s)).map(([name, value]) => [`var-${name}`, value]);
  const { minutes, scrape, theme } = options;
  const asked = new URLSearchParams([['dashboard', `dashboards/${basename(file)}`], ...variables]);
  Object.entries({ minutes, scrape, theme }).forEach(([name, value]) => asked.set(name, value));
  return `http://${LOOPBACK}:${port}/?${asked}`;
}

async function draw(browser, port, file) {
  const page = await browser.newPage({ viewport: { width: Number(options.width), height: 900 }, timezoneId: 'UTC' });
  try {
    const broken = new Promise((_, fail) => page.on('pageerror', fail));
    const drawn = page.waitForSelector('body[data-state]', { state: 'attached', timeout: DRAW_MILLISECONDS });
    await Promise.race([broken, Promise.all([page.goto(address(port, file)), drawn])]);
    const reason = await page.evaluate(() => document.body.dataset.reason);
    if (reason) {
      throw new Error(reason);
    }
    const name = basename(file, '.json');
    const picture = decoded(await page.locator('#root > div').screenshot());
    for (const { box, ...panel } of await page.$$eval('[data-panel]', described)) {
      console.log(JSON.stringify({ dashboard: name, ...panel, ink: ink(picture, box) }));
    }
    await writeFile(join(out, `${name}.png`), small(picture));
  } finally {
    await page.close();
  }
}

/** Runs in the page: what panels say of themselves, and where they are. */
function described(panels) {
  return panels.map((panel) => {
    const { x, y, width, height } = panel.getBoundingClientRect();
    return { ...panel.dataset, box: { x: x + scrollX, y: y + scrollY, width, height } };
  });
}

function decoded(png) {
  const image = UPNG.decode(png);
  return { width: image.width, height: image.height, pixels: new Uint32Array(UPNG.toRGBA8(image)[0]) };
}

/** The share of a panel below its title that is not its background. */
function ink({ width, pixels }, box) {
  const counts = new Map();
  let all = 0;
  for (let y = Math.ceil(box.y) + TITLE; y < box.y + box.height - BORDER; y++) {
    for (let x = Math.ceil(box.x) + BORDER; x < box.x + box.width - BORDER; x++) {
      const colour = pixels[y * width + x];
      counts.set(colour, (counts.get(colour) ?? 0) + 1);
      all++;
    }
  }
  return Number((1 - Math.max(...counts.values()) / all).toFixed(4));
}

/** The picture in few colours: a fraction of the size. */
function small({ width, height, pixels }) {
  return Buffer.from(UPNG.encode([pixels.buffer], width, height, Number(options.colours)));
}

await mkdir(out, { recursive: true });
const server = await serve();
const browser = await chromium.launch({ executablePath: binary, args: FLAGS });
let status = 0;
try {
  for (const file of dashboards) {
    try {
      await draw(browser, server.address().port, file);
    } catch (error) {
      console.error(`${file}: ${error.message}`);
      status = 1;
    }
  }
} finally {
  await browser.close();
  server.closeAllConnections();
  server.close();
}
process.exitCode = status;
