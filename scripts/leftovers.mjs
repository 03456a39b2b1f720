/**
 * What a run left behind: mounts, loop devices, processes, files. The run works in one folder and carries one mark in its
 * environment, so that whatever belongs to it can be told from everything else on the machine.
 */
import { spawnSync } from 'node:child_process';
import { readdirSync, readFileSync, readlinkSync } from 'node:fs';
import { join } from 'node:path';

/** Caches that tools of the run keep in the temporary folder, by right. */
const CACHES = /^(?:tsx-\d+|node-compile-cache|v8-compile-cache.*|vitest.*|\.?esbuild.*|npm-.*)$/;

/**
 * Mount points below `folder`, or whose source lies there; the innermost first.
 * @param {string} folder
 * @returns {string[]}
 */
export function mountsOf(folder) {
  const points = [];
  for (const line of readFileSync('/proc/self/mountinfo', 'utf8').split('\n')) {
    const [left, right] = line.split(' - ');
    const point = unescapeOctal(left?.split(' ')[4] ?? '');
    const source = unescapeOctal(right?.split(' ')[1] ?? '');
    if (point.startsWith(`${folder}/`) || source.startsWith(`${folder}/`)) points.push(point);
  }
  return points.reverse();
}

/** @param {string} text */
function unescapeOctal(text) {
  return text.replace(/\\([0-7]{3})/g, (_, octal) => String.fromCharCode(Number.parseInt(octal, 8)));
}

/**
 * `/dev/loopN` whose file lies below `folder`.
 * @param {string} folder
 */
export function loopsOf(folder) {
  return list('/sys/block')
    .filter((name) => name.startsWith('loop'))
    .filter((name) => read(`/sys/block/${name}/loop/backing_file`).startsWith(`${folder}/`))
    .map((name) => `/dev/${name}`);
}

/**
 * Processes with `mark` in the environment they were started with, other than this one.
 * @param {string} mark `NAME=value`
 */
export function processesOf(mark) {
  return list('/proc')
    .filter((name) => /^\d+$/.test(name) && Number(name) !== process.pid)
    .filter((pid) => read(`/proc/${pid}/environ`).split('\0').includes(mark))
    .filter((pid) => !/^State:\s+Z/m.test(read(`/proc/${pid}/status`)))
    .map((pid) => ({
      pid: Number(pid),
      command: read(`/proc/${pid}/cmdline`).split('\0').join(' ').trim() || exe(pid),
    }));
}

/**
 * Names in `folder` that nobody keeps there by right.
 * @param {string} folder
 */
export function filesOf(folder) {
  return list(folder).filter((name) => !CACHES.test(name));
}

/**
 * Everything of a run that is still there, as lines for a person.
 * @param {{ folder: string, temporary: string, mark: string }} run
 */
export function leftoversOf({ folder, temporary, mark }) {
  return [
    ...mountsOf(folder).map((point) => `mount ${point}`),
    ...loopsOf(folder).map((device) => `loop device ${device}`),
    ...processesOf(mark).map(({ pid, command }) => `process ${pid} ${command.slice(0, 200)}`),
    ...filesOf(temporary).map((name) => `temporary file ${join(temporary, name)}`),
  ];
}

/**
 * Removes what `leftoversOf` found, except files: the caller may delete the folder once nothing is mounted in it.
 * @param {{ folder: string, mark: string }} run
 * @returns {boolean} Whether nothing is mounted there any more.
 */
export function removeLeftovers({ folder, mark }) {
  for (const { pid } of processesOf(mark)) {
    try {
      process.kill(pid, 'SIGKILL');
    } catch {
      // Gone by itself.
    }
  }
  for (const point of mountsOf(folder)) spawnSync('umount', ['-l', point]);
  for (const device of loopsOf(folder)) spawnSync('losetup', ['-d', device]);
  return mountsOf(folder).length === 0;
}

/** @param {string} folder */
function list(folder) {
  try {
    return readdirSync(folder);
  } catch {
    return [];
  }
}

/** @param {string} path */
function read(path) {
  try {
    return readFileSync(path, 'utf8');
  } catch {
    return '';
  }
}

/** @param {string} pid */
function exe(pid) {
  try {
    return readlinkSync(`/proc/${pid}/exe`);
  } catch {
    return '';
  }
}
