/** Times below a panel. */

const PER_TICK = 110;
const BASELINE = 16;
const HALF_A_LABEL = 20;

export function TimeAxis({ across, top, label }) {
  const [left, right] = across.range();
  const ticks = across.ticks(Math.max(2, Math.floor((right - left) / PER_TICK)));
  return ticks
    .filter((when) => across(when) < right - HALF_A_LABEL)
    .map((when) => (
      <text key={+when} x={across(when)} y={top + BASELINE} textAnchor="middle" {...label}>
        {clock(when, across.domain())}
      </text>
    ));
}

function clock(when, [from, to]) {
  const withSeconds = to - from < 10 * 60_000;
  return when.toISOString().slice(11, withSeconds ? 19 : 16);
}
