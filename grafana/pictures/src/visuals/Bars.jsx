/** Bars, one a series. */

import { getDisplayValueAlignmentFactors } from '@grafana/data';
import { BarGauge, VizRepeater } from '@grafana/ui';

import { latestValues } from './values.js';

/** What Grafana takes unless a panel's sizes are set by hand. */
const AUTOMATIC = { minVizHeight: 16, maxVizHeight: 300 };

export function Bars({ panel, frames, theme, width, height }) {
  const { orientation, displayMode, showUnfilled, valueMode, namePlacement, sizing } = panel.options;
  const { minVizHeight, maxVizHeight } = sizing === 'manual' ? panel.options : AUTOMATIC;
  const getValues = () => latestValues(panel, frames, theme);
  const renderValue = ({ value: { display, field }, width, height, alignmentFactors }) => (
    <BarGauge
      {...{ theme, width, height, orientation, displayMode, showUnfilled, namePlacement, alignmentFactors, field }}
      value={display}
      display={field.display}
      text={panel.options.text}
      valueDisplayMode={valueMode}
    />
  );
  return (
    <VizRepeater
      {...{ getValues, renderValue, width, height, orientation }}
      source={frames}
      renderCounter={0}
      itemSpacing={displayMode === 'lcd' ? 2 : 10}
      {...{ minVizHeight, maxVizHeight }}
      getAlignmentFactors={getDisplayValueAlignmentFactors}
    />
  );
}
