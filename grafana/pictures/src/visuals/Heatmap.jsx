/** One row a series, coloured by its values over time. Grafana's own is not in its library; this follows its looks. */

import { getFieldDisplayName } from '@grafana/data';
import * as d3 from 'd3';

import { TimeAxis } from './TimeAxis.jsx';

const LEFT = 100;
const AXIS = 22;
const SCALE = 42;
const NUM_SHADES = 64;
const OVERLAP = 0.5; // keeps the background from shining through between cells

export function Heatmap({ frames, panel, theme, range, width, height }) {
  const rows = frames
    .map((frame) => rowOf(frame, frames))
    .sort((a, b) => a.name.localeCompare(b.name, 'en', { numeric: true }));
  const hidden = panel.options.filterValues?.le ?? -Infinity;
  const cells = rows.flatMap(({ values }) => values).filter((value) => value > hidden);
  const [low, high] = [Math.min(...cells), Math.max(...cells)];
  const { scheme, reverse } = panel.options.color;
  const colour = d3[`interpolate${scheme}`];
  const shade = (value) => {
    const share = high > low ? (value - low) / (high - low) : 0;
    return colour(reverse ? 1 - share : share);
  };
  const across = d3.scaleUtc([range.from * 1000, range.to * 1000], [LEFT, width - 10]);
  const bottom = height - AXIS - SCALE;
  const rowHeight = bottom / rows.length;
  const cell = (until) => {
    const [start, end] = [until - range.step * 1000, until].map((when) => Math.max(LEFT, across(when)));
    return { x: start, width: end - start + (end > start ? OVERLAP : 0) };
  };
  const format = (value) => {
    const { prefix = '', text, suffix = '' } = rows[0].field.display(value);
    return prefix + text + suffix;
  };
  const label = { fontSize: 12, fill: theme.colors.text.primary };
  return (
    <svg {...{ width, height }}>
      {rows.map(({ name, times, values }, row) => (
        <g key={name} transform={`translate(0,${row * rowHeight})`}>
          <text x={LEFT - 8} y={rowHeight / 2} textAnchor="end" dominantBaseline="middle" {...label}>
            {name}
          </text>
          {values.map((value, at) =>
            value > hidden ? <rect key={at} {...cell(times[at])} height={rowHeight - 1} fill={shade(value)} /> : null,
          )}
        </g>
      ))}
      <TimeAxis {...{ across, label }} top={bottom} />
      <Scale {...{ low, high, shade, format, label }} top={bottom + AXIS} width={width} />
    </svg>
  );
}

function Scale({ low, high, shade, format, label, top, width }) {
  const place = d3.scaleLinear([0, NUM_SHADES], [LEFT, width - 10]);
  const shades = Array.from({ length: NUM_SHADES }, (_, at) => low + ((high - low) * at) / (NUM_SHADES - 1));
  return (
    <g transform={`translate(0,${top})`}>
      {shades.map((value, at) => (
        <rect key={at} x={place(at)} width={place(1) - place(0) + OVERLAP} height={10} fill={shade(value)} />
      ))}
      <text x={LEFT} y={26} {...label}>
        {format(low)}
      </text>
      <text x={width - 10} y={26} textAnchor="end" {...label}>
        {format(high)}
      </text>
    </g>
  );
}

function rowOf(frame, frames) {
  const [time, field] = frame.fields;
  return { name: getFieldDisplayName(field, frame, frames), field, times: time.values, values: field.values };
}
