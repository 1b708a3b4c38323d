/** A panel of a dashboard: asks its queries once and shows the answer, or says that there is none. */

import { useTheme2, PanelChrome } from '@grafana/ui';
import { useEffect, useState } from 'react';

import { prepare } from './fields.js';
import { fill } from './variables.js';
import { Bars } from './visuals/Bars.jsx';
import { Heatmap } from './visuals/Heatmap.jsx';
import { Numbers } from './visuals/Numbers.jsx';
import { Rows } from './visuals/Rows.jsx';
import { States } from './visuals/States.jsx';
import { Lines } from './visuals/Lines.jsx';

const VISUALS = {
  bargauge: Bars,
  heatmap: Heatmap,
  stat: Numbers,
  'state-timeline': States,
  table: Rows,
  timeseries: Lines,
};

export function Panel({ panel, width, height, prometheus, values, alerts }) {
  const theme = useTheme2();
  const [shown, setShown] = useState({ state: 'asking' });
  useEffect(() => {
    look(panel, prometheus, values, theme).then(setShown, (error) =>
      setShown({ state: 'error', reason: String(error) }),
    );
  }, []);
  const title = fill(panel.title, values);
  const Visual = VISUALS[panel.type];
  return (
    <div data-panel={title} data-type={panel.type} data-state={shown.state} data-reason={shown.reason}>
      <PanelChrome
        {...{ title, width, height }}
        description={panel.description}
        padding={panel.type === 'table' ? 'none' : 'md'}
      >
        {(innerWidth, innerHeight) =>
          shown.state === 'data' ? (
            <Visual
              {...{ panel, theme, values, alerts }}
              {...shown}
              width={innerWidth}
              height={innerHeight}
              range={prometheus.range}
            />
          ) : (
            <Nothing theme={theme} text={shown.reason ?? ''} width={innerWidth} height={innerHeight} />
          )
        }
      </PanelChrome>
    </div>
  );
}

async function look(panel, prometheus, values, theme) {
  if (!VISUALS[panel.type]) {
    throw new Error(`panels of type ${panel.type} cannot be drawn`);
  }
  const isAlone = panel.targets.length === 1;
  const asked = panel.targets.map((target) => prometheus.frames(target, fill(target.expr, values), isAlone));
  const frames = await prepare((await Promise.all(asked)).flat(), panel, theme, (text) => fill(text, values));
  if (frames.every((frame) => frame.length === 0)) {
    return { state: 'empty', reason: panel.fieldConfig.defaults.noValue ?? 'No data' };
  }
  return { state: 'data', frames };
}

function Nothing({ theme, text, width, height }) {
  const style = { width, height, display: 'flex', alignItems: 'center', justifyContent: 'center' };
  return <div style={{ ...style, color: theme.colors.text.secondary }}>{text}</div>;
}
