/** A sandbox as tables show it: what is filtered and sorted by stands beside the API's view, so that ten thousand of them sort at once. */
import { momentOf } from '../format/times.js';

/**
 * @typedef {object} SandboxRow
 * @property {string} id
 * @property {string} name
 * @property {string} edge
 * @property {string} state
 * @property {string} project
 * @property {string} user
 * @property {string} job
 * @property {string} image
 * @property {number} createdMs
 * @property {number | undefined} expiresMs
 * @property {number | undefined} cpus
 * @property {number | undefined} memoryBytes
 * @property {number} commands Running ones.
 * @property {string} text Lower case, of all that is searched.
 * @property {any} view As the API gave it.
 */

/** @param {any} view @returns {SandboxRow} */
export function sandboxOf(view) {
  const id = String(view.id);
  // Edge ids hold no dot; names may.
  const dot = id.lastIndexOf('.');
  const name = String(view.name ?? id.slice(0, dot));
  const edge = String(view.edge ?? id.slice(dot + 1));
  const owner = view.owner ?? {};
  const project = String(view.project ?? owner.project ?? '');
  const user = String(view.user ?? owner.user ?? '');
  const job = String(view.job ?? owner.job ?? '');
  const image = imageName(view.base ?? view.image);
  // What is not limited is promised an amount all the same.
  const { amounts, limits } = view;
  const cpus = limits?.cpus ?? (amounts?.cpuMilli === undefined ? undefined : amounts.cpuMilli / 1000);
  const memoryBytes = limits?.memoryBytes ?? amounts?.memoryBytes;
  const { runningCommands } = view;
  const commands = Array.isArray(runningCommands) ? runningCommands.length : Number(runningCommands ?? 0);
  return {
    id,
    name,
    edge,
    state: String(view.state ?? ''),
    project,
    user,
    job,
    image,
    createdMs: momentOf(view.createdAt) ?? 0,
    expiresMs: momentOf(view.expiresAt),
    cpus,
    memoryBytes,
    commands,
    text: `${id}\n${project}\n${user}\n${job}\n${image}`.toLowerCase(),
    view,
  };
}

/** @param {unknown} image A name, or a reference with one. @returns {string} */
export function imageName(image) {
  if (typeof image === 'string') return image;
  const { name, digest } = /** @type {any} */ (image ?? {});
  return String(name ?? digest ?? '');
}

/**
 * @typedef {{ text?: string, project?: string, user?: string, job?: string, state?: string, edge?: string }} SandboxFilter
 */

/** @param {Iterable<SandboxRow>} rows @param {SandboxFilter} filter @returns {SandboxRow[]} */
export function filtered(rows, { text = '', project, user, job, state, edge }) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  const found = [];
  for (const row of rows) {
    // A project holds those below it.
    if (project && row.project !== project && !row.project.startsWith(`${project}/`)) continue;
    if (user && row.user !== user) continue;
    if (job && row.job !== job) continue;
    if (state && row.state !== state) continue;
    if (edge && row.edge !== edge) continue;
    if (words.length > 0 && !words.every((word) => row.text.includes(word))) continue;
    found.push(row);
  }
  return found;
}
