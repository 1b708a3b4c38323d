/**
 * The page: one dashboard, as its address says (`dashboard`: address of its JSON; `minutes` before now; `scrape`:
 * seconds between scrapes; `theme`: dark or light; `var-NAME`: values of variables). Asks Prometheus at its own origin.
 * Once all panels have their answers and are drawn, `document.body.dataset.state` is "drawn".
 */

import '@fontsource/inter/400.css';
import '@fontsource/inter/500.css';
import { ThemeContext, createTheme } from '@grafana/data';
import { GlobalStyles } from '@grafana/ui';
import { createRoot } from 'react-dom/client';

import { Dashboard } from './Dashboard.jsx';
import { Prometheus } from './prometheus.js';
import { fill, resolve } from './variables.js';

const POINTS = 240;
const QUIET_MILLISECONDS = 400;

const asked = new URLSearchParams(location.search);

async function main() {
  const theme = createTheme({ colors: { mode: asked.get('theme') ?? 'dark' } });
  const dashboard = await (await fetch(asked.get('dashboard'))).json();
  const prometheus = new Prometheus('.', range());
  const chosen = [...asked].filter(([name]) => name.startsWith('var-')).map(([name, value]) => [name.slice(4), value]);
  const values = await resolve(dashboard, prometheus, Object.fromEntries(chosen));
  const alerts = await annotations(dashboard, prometheus, values);
  document.title = dashboard.title;
  document.body.style.background = theme.colors.background.canvas;
  await Promise.all(['400', '500'].map((weight) => document.fonts.load(`${weight} 14px Inter`)));
  createRoot(document.getElementById('root')).render(
    <ThemeContext.Provider value={theme}>
      <GlobalStyles />
      <Dashboard {...{ dashboard, prometheus, values, alerts }} width={document.documentElement.clientWidth} />
    </ThemeContext.Provider>,
  );
  await settled();
  document.body.dataset.state = 'drawn';
}

function range() {
  const seconds = Number(asked.get('minutes') ?? 60) * 60;
  const scrape = Number(asked.get('scrape') ?? 15);
  const to = Math.floor(Date.now() / 1000);
  return { from: to - seconds, to, step: Math.max(scrape, Math.round(seconds / POINTS)), scrape };
}

/** When the dashboard's annotations began and ended: [from, to, text], milliseconds. */
async function annotations(dashboard, prometheus, values) {
  const step = prometheus.range.step;
  const rows = await Promise.all(
    dashboard.annotations.list
      .filter(({ enable, expr }) => enable && expr)
      .map(({ expr }) => prometheus.overTime(fill(expr, values))),
  );
  return rows.flat().map(({ metric, values: points }) => {
    const times = points.map(([when]) => when);
    return [Math.min(...times) * 1000, (Math.max(...times) + step) * 1000, metric.alertname];
  });
}

/** Waits until no panel is still asking and the last drawing is done. */
async function settled() {
  const pause = (milliseconds) => new Promise((done) => setTimeout(done, milliseconds));
  do {
    await pause(50);
  } while (!document.querySelector('[data-panel]') || document.querySelector('[data-state=asking]'));
  await pause(QUIET_MILLISECONDS);
}

main().catch((error) => {
  document.body.dataset.state = 'failed';
  document.body.dataset.reason = String(error?.stack ?? error);
});
