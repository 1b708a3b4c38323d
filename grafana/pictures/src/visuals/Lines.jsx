/** Lines and stacked areas over time. */

import { TimeSeries } from '@grafana/ui';
import { dateTime } from '@grafana/data';
import { useMemo } from 'react';

const ALERT = 'rgba(255, 152, 48, 0.55)';

export function Lines({ panel, frames, alerts, range, width, height }) {
  const timeRange = useMemo(() => {
    const [from, to] = [dateTime(range.from * 1000), dateTime(range.to * 1000)];
    return { from, to, raw: { from, to } };
  }, [range]);
  return (
    <TimeSeries
      {...{ frames, timeRange, width, height }}
      timeZone="utc"
      legend={{ calcs: [], ...panel.options.legend }}
      options={panel.options}
    >
      {(config) => mark(config, alerts)}
    </TimeSeries>
  );
}

const marked = new WeakSet();

/** Draws when alerts began, dashed, as Grafana draws annotations. */
function mark(config, alerts) {
  if (marked.has(config)) {
    return null;
  }
  marked.add(config);
  config.addHook('draw', (plot) => {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.strokeStyle = ctx.fillStyle = ALERT;
    ctx.setLineDash([5, 5]);
    for (const [from] of alerts) {
      const x = plot.valToPos(from, 'x', true);
      if (x < bbox.left || x > bbox.left + bbox.width) {
        continue;
      }
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  });
  return null;
}
