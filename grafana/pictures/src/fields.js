/** From frames to what a panel shows: transformations, units, thresholds and overrides, done by Grafana's library. */

import {
  FieldConfigOptionsRegistry,
  applyFieldOverrides,
  cacheFieldDisplayNames,
  standardTransformers,
  standardTransformersRegistry,
  transformDataFrame,
} from '@grafana/data';
import { firstValueFrom } from 'rxjs';

const STANDARD = [
  'unit',
  'min',
  'max',
  'decimals',
  'displayName',
  'color',
  'noValue',
  'thresholds',
  'mappings',
  'links',
];

/** What Grafana's panel for time series takes where a dashboard is silent. */
const TIME_SERIES = {
  drawStyle: 'line',
  lineInterpolation: 'linear',
  lineWidth: 1,
  fillOpacity: 0,
  gradientMode: 'none',
  showPoints: 'auto',
  pointSize: 5,
  spanNulls: false,
  stacking: { mode: 'none', group: 'A' },
  axisPlacement: 'auto',
  axisLabel: '',
  axisColorMode: 'text',
  axisBorderShow: false,
  scaleDistribution: { type: 'linear' },
  thresholdsStyle: { mode: 'off' },
  hideFrom: { legend: false, tooltip: false, viz: false },
};

standardTransformersRegistry.setInit(() =>
  [...new Set(Object.values(standardTransformers))].map((transformation) => ({
    id: transformation.id,
    name: transformation.name,
    transformation,
  })),
);

export async function prepare(frames, panel, theme, replaceVariables) {
  const context = { interpolate: replaceVariables };
  const data = await firstValueFrom(transformDataFrame(panel.transformations ?? [], frames, context));
  const fieldConfig = complete(panel);
  const options = { theme, replaceVariables, timeZone: 'utc', fieldConfig };
  const shown = applyFieldOverrides({ ...options, data, fieldConfigRegistry: registry(fieldConfig) });
  cacheFieldDisplayNames(shown); // colours go by them
  return shown;
}

function complete(panel) {
  const { defaults, overrides } = structuredClone(panel.fieldConfig);
  if (panel.type === 'timeseries') {
    defaults.custom = { ...TIME_SERIES, ...defaults.custom };
  }
  for (const property of overrides.flatMap((rule) => rule.properties)) {
    if (property.id === 'thresholds') {
      bottomless(property.value);
    }
  }
  bottomless(defaults.thresholds);
  return { defaults, overrides };
}

// JSON has no infinity: the step that everything is above is null there.
function bottomless(thresholds) {
  for (const step of thresholds?.steps ?? []) {
    step.value ??= -Infinity;
  }
}

function registry({ defaults, overrides }) {
  const named = overrides.flatMap((rule) => rule.properties.map(({ id }) => id));
  const custom = Object.keys(defaults.custom ?? {}).map((name) => `custom.${name}`);
  const ids = [...new Set([...STANDARD, ...custom, ...named])];
  return new FieldConfigOptionsRegistry(() =>
    ids.map((id) => ({
      id,
      name: id,
      path: id.replace(/^custom\./, ''),
      isCustom: id.startsWith('custom.'),
      process: (value) => value,
      shouldApply: () => true,
    })),
  );
}
