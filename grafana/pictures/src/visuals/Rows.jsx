/** A table. */

import { Table } from '@grafana/ui';

export function Rows({ panel, frames, width, height }) {
  return (
    <Table
      data={frames[0]}
      {...{ width, height }}
      cellHeight={panel.options.cellHeight}
      initialSortBy={panel.options.sortBy}
      showTypeIcons={panel.options.showTypeIcons}
    />
  );
}
