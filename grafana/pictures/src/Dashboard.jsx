/** A dashboard: its panels where Grafana's grid puts them. */

import { useTheme2 } from '@grafana/ui';

import { Panel } from './Panel.jsx';
import { fill } from './variables.js';

const NUM_COLUMNS = 24;
const ROW = 30;
const GAP = 8;
const HEADER = 56;

export function Dashboard({ dashboard, width, prometheus, values, alerts }) {
  const column = (width - GAP) / NUM_COLUMNS;
  const panels = dashboard.panels.flatMap((panel) => [panel, ...(panel.panels ?? [])]);
  const bottom = Math.max(...panels.map(({ gridPos }) => gridPos.y + gridPos.h));
  return (
    <div style={{ position: 'relative', width, height: HEADER + bottom * (ROW + GAP) + GAP }}>
      <Header {...{ dashboard, values }} />
      {panels.map((panel) => {
        const { x, y, w, h } = panel.gridPos;
        const place = { left: GAP + x * column, top: HEADER + y * (ROW + GAP) };
        const size = { width: w * column - GAP, height: h * (ROW + GAP) - GAP };
        return (
          <div key={`${x} ${y}`} style={{ position: 'absolute', ...place, ...size }}>
            {panel.type === 'row' ? (
              <RowTitle text={fill(panel.title, values)} />
            ) : (
              <Panel {...{ panel, prometheus, values, alerts }} {...size} />
            )}
          </div>
        );
      })}
    </div>
  );
}

function RowTitle({ text }) {
  const theme = useTheme2();
  return <div style={{ ...theme.typography.h5, color: theme.colors.text.primary, lineHeight: `${ROW}px` }}>{text}</div>;
}

function Header({ dashboard, values }) {
  const theme = useTheme2();
  const shown = dashboard.templating.list.filter(({ type, hide }) => type === 'query' && hide !== 2);
  const box = {
    border: `1px solid ${theme.colors.border.medium}`,
    borderRadius: theme.shape.radius.default,
    padding: '3px 8px',
    color: theme.colors.text.primary,
  };
  return (
    <div style={{ display: 'flex', alignItems: 'center', gap: 16, height: HEADER, padding: `0 ${GAP}px` }}>
      <div style={{ ...theme.typography.h4, color: theme.colors.text.primary, margin: 0 }}>{dashboard.title}</div>
      {shown.map(({ name, label }) => (
        <div key={name} style={{ display: 'flex', alignItems: 'center', gap: 6, color: theme.colors.text.secondary }}>
          {label ?? name}
          <span style={box}>{values[name] === '.*' ? 'All' : values[name]}</span>
        </div>
      ))}
    </div>
  );
}
