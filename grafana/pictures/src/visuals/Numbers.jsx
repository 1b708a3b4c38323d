/** Single numbers, large. */

import { BigValue, VizRepeater } from '@grafana/ui';

import { latestValues } from './values.js';

export function Numbers({ panel, frames, theme, width, height }) {
  const { orientation, graphMode, colorMode, justifyMode, textMode, wideLayout } = panel.options;
  const getValues = () => latestValues(panel, frames, theme, { sparkline: graphMode !== 'none' });
  const renderValue = ({ value: { display, sparkline, field }, width, height, count }) => {
    if (sparkline) {
      sparkline.yRange = { min: field.min, max: field.max };
    }
    return (
      <BigValue
        {...{ theme, width, height, count, colorMode, graphMode, justifyMode, textMode, wideLayout, sparkline }}
        value={{ ...display, title: count === 1 && textMode === 'auto' ? undefined : display.title }}
      />
    );
  };
  return (
    <VizRepeater
      {...{ getValues, renderValue, width, height, orientation }}
      source={frames}
      renderCounter={0}
      autoGrid
    />
  );
}
