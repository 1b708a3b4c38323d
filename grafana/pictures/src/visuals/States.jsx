/** Rows of states over time, equal ones joined. Grafana's own is not in its library; this follows its looks. */

import { getFieldDisplayName } from '@grafana/data';
import { scaleUtc } from 'd3';

import { TimeAxis } from './TimeAxis.jsx';

const LEFT = 110;
const AXIS = 22;
const LEGEND = 24;
const PER_CHARACTER = 8;

export function States({ frames, panel, theme, range, width, height }) {
  const across = scaleUtc([range.from * 1000, range.to * 1000], [LEFT, width - 10]);
  const rowHeight = (height - AXIS - LEGEND) / frames.length;
  const bar = rowHeight * panel.options.rowHeight;
  const label = { fontSize: 12, fill: theme.colors.text.primary };
  const states = new Map();
  const rows = frames.map((frame) => {
    const [time, field] = frame.fields;
    const spans = joined(time.values, field, range.step * 1000);
    spans.forEach(({ text, color }) => states.set(text, color));
    return { name: getFieldDisplayName(field, frame, frames), spans };
  });
  return (
    <svg {...{ width, height }}>
      {rows.map(({ name, spans }, row) => (
        <g key={name} transform={`translate(0,${row * rowHeight})`}>
          <text x={LEFT - 8} y={bar / 2} textAnchor="end" dominantBaseline="middle" {...label}>
            {name}
          </text>
          {spans.map(({ from, to, text, color }) => {
            const [start, end] = [Math.max(across(from), LEFT), Math.min(across(to), width - 10)];
            return (
              <g key={from}>
                <rect x={start} width={end - start} height={bar} fill={color} fillOpacity={0.7} />
                {end - start > text.length * PER_CHARACTER && bar > 12 && (
                  <text x={start + 6} y={bar / 2} dominantBaseline="middle" {...label}>
                    {text}
                  </text>
                )}
              </g>
            );
          })}
        </g>
      ))}
      <TimeAxis {...{ across, label }} top={height - AXIS - LEGEND} />
      {[...states].map(([text, color], at) => (
        <g key={text} transform={`translate(${LEFT + at * 90},${height - 14})`}>
          <rect width={14} height={4} y={4} fill={color} />
          <text x={20} y={10} {...label}>
            {text}
          </text>
        </g>
      ))}
    </svg>
  );
}

function joined(times, field, step) {
  const spans = [];
  times.forEach((when, at) => {
    const { text, color } = field.display(field.values[at]);
    const last = spans.at(-1);
    const gap = Number(field.config.custom?.spanNulls) || 0; // a number of milliseconds, or false
    if (last?.text === text && when - last.to <= Math.max(step, gap)) {
      last.to = when + step;
    } else {
      spans.push({ from: when, to: when + step, text, color });
    }
  });
  return spans;
}
