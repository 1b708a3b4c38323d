/**
 * A dashboard as Grafana 11.6 reads it, from the types of `@grafana/schema`: what `dashboard.schema.json` is made from.
 *
 * Stricter than Grafana: a panel is one of the kinds that are used, with exactly the options of its kind, and asks
 * Prometheus. What the package does not have, as it lives in plugins, is written out here: a query of Prometheus, an
 * annotation made of one, and the transformations.
 */
import type * as schema from "@grafana/schema/dist/esm/index";
import type * as raw from "@grafana/schema/dist/esm/raw/dashboard/x/dashboard_types.gen";
import type * as bargauge from "@grafana/schema/dist/esm/raw/composable/bargauge/panelcfg/x/BarGaugePanelCfg_types.gen";
import type * as heatmap from "@grafana/schema/dist/esm/raw/composable/heatmap/panelcfg/x/HeatmapPanelCfg_types.gen";
import type * as stat from "@grafana/schema/dist/esm/raw/composable/stat/panelcfg/x/StatPanelCfg_types.gen";
import type * as timeline from "@grafana/schema/dist/esm/raw/composable/statetimeline/panelcfg/x/StateTimelinePanelCfg_types.gen";
import type * as table from "@grafana/schema/dist/esm/raw/composable/table/panelcfg/x/TablePanelCfg_types.gen";
import type * as timeseries from "@grafana/schema/dist/esm/raw/composable/timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen";

interface Prometheus extends raw.DataSourceRef {
  type: "prometheus";
  uid: "${datasource}";
}

/** `PromQuery` of the Prometheus data source. */
interface Query {
  datasource: Prometheus;
  expr: string;
  format?: "heatmap" | "table" | "time_series";
  instant: boolean;
  legendFormat: string;
  range: boolean;
  refId: string;
}

type Transformation =
  | { id: "merge"; options: Record<string, never> }
  | {
      id: "organize";
      options: {
        excludeByName: Record<string, boolean>;
        indexByName: Record<string, number>;
        renameByName: Record<string, string>;
      };
    }
  | {
      id: "groupingToMatrix";
      options: { columnField: string; emptyValue: "empty" | "null" | "zero"; rowField: string; valueField: string };
    };

/** Required of all of ours, though Grafana can do without. */
interface Always {
  datasource: Prometheus;
  description: string;
  gridPos: raw.GridPos;
  id: number;
  title: string;
}

interface Fields<Custom> {
  defaults: Omit<raw.FieldConfig, "custom" | "noValue" | "unit"> & { custom?: Custom; noValue: string; unit: string };
  overrides: raw.FieldConfigSource["overrides"];
}

type Panel<Kind extends string, Options, Custom> = Omit<
  raw.Panel,
  "fieldConfig" | "options" | "targets" | "transformations" | "type" | keyof Always
> &
  Always & {
    fieldConfig: Fields<Custom>;
    options: Options;
    targets: Query[];
    transformations?: Transformation[];
    type: Kind;
  };

type AnyPanel =
  | Panel<"bargauge", bargauge.Options, Record<string, never>>
  | Panel<"heatmap", heatmap.Options, Partial<heatmap.FieldConfig>>
  | Panel<"stat", stat.Options, Record<string, never>>
  | Panel<"state-timeline", timeline.Options, Partial<timeline.FieldConfig>>
  | Panel<"table", table.Options, Partial<table.FieldConfig>>
  | Panel<"timeseries", timeseries.Options, Partial<timeseries.FieldConfig>>;

type Row = Omit<schema.RowPanel, "panels"> & { panels: never[] };

/** What the Prometheus data source makes annotations of. */
interface Annotation extends Omit<raw.AnnotationQuery, "datasource"> {
  datasource: Prometheus;
  expr: string;
  step: string;
  tagKeys: string;
  textFormat: string;
  titleFormat: string;
}

type Told = "description" | "links" | "refresh" | "tags" | "time" | "title" | "uid";

export type Dashboard = Omit<raw.Dashboard, "annotations" | "panels" | "templating" | Told> & {
  annotations: { list: Annotation[] };
  description: string;
  links: raw.DashboardLink[];
  panels: Array<AnyPanel | Row>;
  refresh: string;
  tags: string[];
  templating: { list: raw.VariableModel[] };
  time: { from: string; to: string };
  title: string;
  uid: string;
};
