/** The value of each series that a panel reduces it to, as Grafana displays it. */

import { getFieldDisplayValues } from '@grafana/data';

export function latestValues(panel, frames, theme, more = {}) {
  return getFieldDisplayValues({
    fieldConfig: panel.fieldConfig,
    reduceOptions: panel.options.reduceOptions,
    replaceVariables: (text) => text,
    theme,
    data: frames,
    timeZone: 'utc',
    ...more,
  });
}
