// Reads a JSON list of the Prometheus operator's objects and prints a JSON list of what is wrong with each: [] if nothing.
// The schemas allow properties that they do not know, which a cluster would drop without a word; one that the validator
// never looks at is such a property.
import { readFileSync } from "node:fs";

function watched(value, path, seen) {
  if (value === null || typeof value !== "object") return value;
  const children = new Map();
  for (const key of Object.keys(value)) children.set(key, watched(value[key], `${path}/${key}`, seen));
  return new Proxy(value, {
    get(target, key) {
      if (typeof key === "string") seen.add(`${path}/${key}`);
      return children.has(key) ? children.get(key) : target[key];
    },
  });
}

function paths(value, path = "") {
  if (value === null || typeof value !== "object") return [];
  return Object.keys(value).flatMap((key) => [`${path}/${key}`, ...paths(value[key], `${path}/${key}`)]);
}

async function problems(object) {
  const { [object.kind]: Model } = await import(`@kubernetes-models/prometheus-operator/${object.apiVersion}/${object.kind}`);
  try {
    new Model(object).validate();
  } catch (error) {
    return [error.message];
  }
  const seen = new Set();
  const model = new Model({});
  for (const key of Object.keys(object)) model[key] = watched(object[key], `/${key}`, seen);
  model.validate();
  return paths(object)
    .filter((path) => path.split("/").length > 2 && !path.startsWith("/metadata/") && !seen.has(path))
    .map((path) => `${path} is not in the schema`);
}

const objects = JSON.parse(readFileSync(0, "utf8"));
process.stdout.write(JSON.stringify(await Promise.all(objects.map(problems))));
