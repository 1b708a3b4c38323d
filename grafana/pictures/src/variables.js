/** The variables of a dashboard: what they are, and texts with them filled in. */

const MENTION = /\$\{(\w+)(?::\w+)?\}|\$(\w+)/g;

/** Resolves the variables in their order; `chosen` maps names to values that the dashboard was opened with. */
export async function resolve(dashboard, prometheus, chosen) {
  const { from, to, step, scrape } = prometheus.range;
  const values = {
    __interval: `${step}s`,
    __rate_interval: `${Math.max(step + scrape, 4 * scrape)}s`,
    __range: `${to - from}s`,
  };
  for (const variable of dashboard.templating.list) {
    values[variable.name] = chosen[variable.name] ?? (await initial(variable, prometheus, values));
  }
  return values;
}

/** The text with all variables filled in; unknown ones stay as they are. */
export function fill(text, values) {
  return text.replace(MENTION, (mention, braced, bare) => values[braced ?? bare] ?? mention);
}

async function initial(variable, prometheus, values) {
  if (variable.type !== 'query') {
    return variable.query;
  }
  if (variable.includeAll) {
    return variable.allValue;
  }
  const options = await found(fill(variable.query, values), prometheus);
  const pattern = variable.regex && new RegExp(variable.regex.replace(/^\/|\/$/g, ''));
  const texts = options.map((option) => (pattern ? option.match(pattern)?.[1] : option)).filter(Boolean);
  return texts.sort(new Intl.Collator('en', { numeric: true }).compare)[0] ?? '';
}

async function found(query, prometheus) {
  const labels = query.match(/^label_values\((.+),\s*(\w+)\)$/s);
  if (labels) {
    return prometheus.labelValues(labels[2], labels[1]);
  }
  const rows = await prometheus.instant(query.match(/^query_result\((.+)\)$/s)[1]);
  return rows.map(({ metric, value: [time, value] }) => {
    const { __name__: name = '', ...others } = metric;
    const inside = Object.entries(others).map(([label, text]) => `${label}="${text}"`);
    return `${name}{${inside.join(',')}} ${value} ${time * 1000}`;
  });
}
