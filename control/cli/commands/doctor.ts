/** `dsec doctor`: what this machine has, what each thing is for, and what takes its place. */
import { existsSync } from 'node:fs';
import { dirname } from 'node:path';
import { fileURLToPath } from 'node:url';
import { messageOf } from '#base';
import { defaultStoreUrl } from '#imagesvc';
import { detect, type Feature } from '#linux';
import { diskRows } from '../../doctor/disks.ts';
import { edgeRows } from '../../doctor/edge.ts';
import { firecrackerRow } from '../../doctor/firecracker.ts';
import { fncallRows } from '../../doctor/fncall.ts';
import { isolationRows } from '../../doctor/isolation.ts';
import { limitRows } from '../../doctor/limits.ts';
import { machineRows } from '../../doctor/machines.ts';
import { networkRows } from '../../doctor/network.ts';
import { runtimeRows } from '../../doctor/runtimes.ts';
import { findTools } from '../../doctor/tools.ts';
import type { CommandDefinition } from '../command.ts';
import type { Context } from '../context.ts';
import { type JsonOption, type StoreOption, withJson, withStore } from '../store-option.ts';
import { projectVersion } from '../version.ts';

export const definition: CommandDefinition = {
  description:
    'Lists kernel features and tools: what is there, what each is for, and what falls back to what without it. Mounts that are tried out are never ' +
    'attached. What nothing uses yet is shown with --all, marked "later". Exits with 5 only when something is missing that every command needs.\n\n' +
    'With --edge: how the machine should be set before code of others runs on it, what was found and what to do; exits with 5 when something is not as it must be.',
  examples: [
    { line: 'sudo dsec doctor', what: 'with root, features are tried instead of guessed' },
    { line: 'sudo dsec doctor --edge', what: 'whether this machine is fit to be an edge of a cluster' },
    { line: "dsec doctor --json | jq '.features[] | select(.present | not)'", what: 'what is missing' },
  ],
  json: 'an object: `ok`, `dsec`, `node`, `root`, `failure`, `features` (`name`, `present`, `detail`, `usedFor`, `fallback`, `later`), `runtime` and `disks` (rows of the same kind), `tools` (`name`, `present`, `path`, `version`, `purpose`, `without`, `package`); with --edge: `ok`, `edge` (`name`, `ok`, `severity`: must or should, `found`, `why`, `remedy`)',
  configure(command, context) {
    const { output } = context;
    withJson(withStore(command))
      .option('--all', 'also what nothing uses yet')
      .option('--edge', 'how this machine should be set to run sandboxes of others')
      .action(async (options: StoreOption & JsonOption & { all?: boolean; edge?: boolean }) => {
        if (options.edge) return edgeReport(context, options.json === true);
        const folder = existingFolder(options.store ?? defaultStoreUrl());
        const { features: known, failure } = kernelFeatures(folder);
        const features = options.all ? known : known.filter((feature) => !feature.later);
        const tools = await findTools();
        // Asking the driver needs system calls too.
        const disks = failure === undefined ? await diskRows() : [];
        const isolation = failure === undefined ? await isolationRows() : [];
        const later = options.all && failure === undefined ? [firecrackerRow()] : [];
        const runtime = [
          ...runtimeRows(),
          ...machineRows(),
          ...limitRows(),
          ...(await fncallRows()).filter(({ later }) => options.all || !later),
          ...networkRows(),
          ...isolation,
          ...later,
        ];
        const ok = failure === undefined;
        if (!ok) context.exitCode = 5;
        const versions = { dsec: projectVersion(), node: process.versions.node };
        if (options.json) {
          return output.json({
            ok,
            ...versions,
            root: process.geteuid?.() === 0,
            failure,
            features,
            runtime,
            disks,
            tools: tools.map(({ name, path, version, purpose, without, package: apt }) => ({
              name,
              present: path !== undefined,
              path,
              version,
              purpose,
              without,
              package: apt,
            })),
          });
        }
        await output.line(
          `dsec ${versions.dsec}, Node ${versions.node}${process.geteuid?.() === 0 ? '' : ', not root: some rows are guesses'}`,
        );
        await output.line();
        if (failure === undefined) {
          const rows = features.map(({ name, present, detail, usedFor, fallback, later }) => ({
            name,
            present,
            detail,
            usedFor: later ? `later: ${usedFor}` : usedFor,
            fallback,
          }));
          await section('KERNEL', rows);
        } else output.note(`dsec: system calls do not work: ${failure}\n      reinstall the packages: npm ci`);
        await output.line();
        await section('RUNTIME', runtime);
        if (failure === undefined) {
          await output.line();
          await section('DISKS', disks);
        }
        await output.line();
        await section(
          'TOOL',
          tools.map(({ name, path, version, purpose, without, package: apt }) => ({
            name,
            present: path !== undefined,
            detail: path === undefined ? `apt-get install ${apt}` : (version ?? path),
            usedFor: purpose,
            fallback: without,
          })),
        );
      });

    async function section(title: string, rows: readonly Feature[]): Promise<void> {
      await output.table(
        [{ title }, { title: '' }, { title: 'FOR' }, { title: 'FOUND, OR INSTEAD' }],
        rows.map(({ name, present, detail, usedFor, fallback }) => [
          name,
          present ? 'yes' : 'no',
          usedFor,
          present ? detail : `${fallback} (${detail})`,
        ]),
      );
    }
  },
};

async function edgeReport(context: Context, asJson: boolean): Promise<void> {
  const rows = await edgeRows();
  const ok = rows.every((row) => row.ok || row.severity === 'should');
  if (!ok) context.exitCode = 5;
  if (asJson) return context.output.json({ ok, edge: rows });
  await context.output.table(
    [{ title: 'EDGE' }, { title: '' }, { title: 'FOUND' }, { title: 'WHY, AND WHAT TO DO' }],
    rows.map(({ name, ok: fine, severity, found, why, remedy }) => [
      name,
      fine ? 'yes' : severity === 'must' ? 'NO' : 'no',
      found,
      fine ? why : `${why}: ${remedy}`,
    ]),
  );
}

/** System calls go through a compiled library: when it does not load, nothing that mounts can work. */
function kernelFeatures(folder: string | undefined): { features: Feature[]; failure: string | undefined } {
  try {
    return { features: detect({ folder }), failure: undefined };
  } catch (error) {
    return { features: [], failure: messageOf(error) };
  }
}

/** Images are mounted from the store's file system: that one is tried. */
function existingFolder(store: string): string | undefined {
  if (/^[a-z0-9]+:\/\//.test(store) && !store.startsWith('file://')) return undefined;
  let folder = store.startsWith('file://') ? fileURLToPath(store) : store;
  while (!existsSync(folder) && folder !== dirname(folder)) folder = dirname(folder);
  return folder;
}
