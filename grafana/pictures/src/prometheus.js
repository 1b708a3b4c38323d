/** What a Prometheus answers, as the frames that Grafana's own data source makes of it. */

import { FieldType } from '@grafana/data';

const SECOND = 1000;

export class Prometheus {
  /**
   * @param {string} url base address
   * @param {{from: number, to: number, step: number}} range what is looked at; seconds
   */
  constructor(url, range) {
    this.url = url;
    this.range = range;
  }

  async ask(path, parameters) {
    const response = await fetch(`${this.url}/api/v1/${path}?${new URLSearchParams(parameters)}`);
    const answer = await response.json();
    if (answer.status !== 'success') {
      throw new Error(answer.error);
    }
    return answer.data;
  }

  /** Values of a label of the series that match. */
  labelValues(label, match) {
    const { from, to } = this.range;
    return this.ask(`label/${label}/values`, { 'match[]': match, start: from, end: to });
  }

  /** Rows of an instant query. */
  async instant(query) {
    return (await this.ask('query', { query, time: this.range.to })).result;
  }

  /** Rows of a range query. */
  async overTime(query) {
    const { from, to, step } = this.range;
    return (await this.ask('query_range', { query, start: from, end: to, step })).result;
  }

  /** Frames of one target of a panel, whose expression has its variables filled in. */
  async frames(target, expression, isAlone) {
    if (target.instant) {
      const rows = await this.instant(expression);
      return target.format === 'table'
        ? table(rows, target, isAlone)
        : rows.map(({ metric, value }) => series(metric, [value], target));
    }
    const rows = await this.overTime(expression);
    return rows.map(({ metric, values }) => series(metric, values, target, this.range.step));
  }
}

function series(labels, points, target, step) {
  const interval = step ? { interval: step * SECOND } : {};
  const name = legend(labels, target.legendFormat);
  const time = points.map(([when]) => when * SECOND);
  const values = points.map(([, value]) => Number(value));
  return {
    refId: target.refId,
    name,
    length: points.length,
    fields: [
      { name: 'Time', type: FieldType.time, config: interval, values: time },
      { name: 'Value', type: FieldType.number, config: { displayNameFromDS: name }, labels, values },
    ],
  };
}

function table(rows, target, isAlone) {
  if (rows.length === 0) {
    return [];
  }
  const labels = [...new Set(rows.flatMap(({ metric }) => Object.keys(metric)))].sort();
  const column = (name, type, values) => ({ name, type, config: {}, values });
  return [
    {
      refId: target.refId,
      length: rows.length,
      fields: [
        column(
          'Time',
          FieldType.time,
          rows.map(({ value }) => value[0] * SECOND),
        ),
        ...labels.map((label) =>
          column(
            label,
            FieldType.string,
            rows.map(({ metric }) => metric[label] ?? ''),
          ),
        ),
        column(
          isAlone ? 'Value' : `Value #${target.refId}`,
          FieldType.number,
          rows.map(({ value }) => Number(value[1])),
        ),
      ],
    },
  ];
}

function legend(labels, format) {
  if (format && format !== '__auto') {
    return format.replace(/\{\{\s*(\w+)\s*\}\}/g, (_, label) => labels[label] ?? '');
  }
  const { __name__: name = '', ...others } = labels;
  const shown = Object.entries(others).map(([label, value]) => `${label}="${value}"`);
  return shown.length ? `${name}{${shown.join(', ')}}` : name;
}
