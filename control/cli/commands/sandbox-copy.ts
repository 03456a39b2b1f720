/** `dsec sandbox cp`: files and folders into a sandbox and out of it. */
import { stat } from 'node:fs/promises';
import { resolve } from 'node:path';
import type { Command } from 'commander';
import { isDsecError } from '#base';
import { fail } from '../../errors.ts';
import { fetchFile, fetchWhole, sendFile, sendWhole } from '../../runtime-service/file-transfer.ts';
import { onMachinePath, requireSource } from '../../runtime-service/machine-path.ts';
import type { SandboxClient } from '../../runtime-service/sandbox-client.ts';
import { fetchTree, sendTree } from '../../runtime-service/tree-transfer.ts';
import type { Context } from '../context.ts';
import { withExamples } from '../examples.ts';
import { sandboxClient } from '../sandbox-client-of.ts';

export function addCopy(command: Command, context: Context): void {
  const copy = withExamples(
    command
      .command('cp')
      .description(
        'Copies a file or a folder into a sandbox or out of it, with modes, times, links and holes. A folder that is there is gone into, as cp does. ' +
          'Nothing in the sandbox leads the copy out of it; out of it, owners are yours, and set-user-id bits go. With --verify one file, which goes on where it was when the ' +
          'runtime service is started again meanwhile or the command is, and is at its place only when its sha256 is right.',
      ),
    [
      { line: 'dsec sandbox cp ./src work:/workspace/src', what: 'in' },
      { line: 'dsec sandbox cp work:/workspace/report.html .', what: 'out' },
      { line: 'dsec sandbox cp --verify model.bin work:/workspace/', what: 'a large file, whole or not at all' },
    ],
  );
  copy
    .argument('<from>', 'PATH, or NAME:PATH in a sandbox')
    .argument('<to>', 'the other of the two')
    .option('--verify', 'one file, checked at both ends, and gone on with after a break')
    .action(async (from: string, to: string, { verify }: { readonly verify?: boolean }) => {
      const [inside, target] = [placeOf(from), placeOf(to)];
      const client = sandboxClient(context);
      const notes = (text: string) => context.output.note(`dsec: ${text}`);
      if (inside !== undefined && target === undefined) {
        const path = await hostTarget(to, inside.path);
        if (verify) return onMachinePath(path, () => fetchFile(client, inside.name, inside.path, path));
        const fetch = () =>
          client.isRemote
            ? fetchTree(client, inside.name, inside.path, path, notes)
            : client.copy(inside.name, 'download', inside.path, path);
        return onMachinePath(path, () => orElse(fetch, () => fetchWhole(client, inside.name, inside.path, path)));
      }
      if (inside === undefined && target !== undefined) {
        const source = resolve(from);
        await requireSource(source);
        const into = await isFolder(client, target.name, target.path);
        const path = into ? `${target.path.replace(/\/+$/, '')}/${lastName(source)}` : target.path;
        if (verify) return onMachinePath(source, () => sendFile(client, target.name, source, path));
        const send = () =>
          client.isRemote
            ? sendTree(client, target.name, source, path, notes)
            : client.copy(target.name, 'upload', source, path);
        return onMachinePath(source, async () =>
          (await leadsToFile(source)) ? orElse(send, () => sendWhole(client, target.name, source, path)) : send(),
        );
      }
      throw fail('SANDBOX_COPY', { from, to });
    });
}

/** A link may lead nowhere, and is copied all the same. */
function leadsToFile(path: string): Promise<boolean> {
  return stat(path).then(
    (found) => found.isFile(),
    () => false,
  );
}

/** A whole machine has no more than single files, read and written at one go. */
async function orElse(copy: () => Promise<void>, whole: () => Promise<void>): Promise<void> {
  try {
    await copy();
  } catch (error) {
    if (!isDsecError(error, 'RUNTIME_UNSUPPORTED')) throw error;
    await whole();
  }
}

/** `NAME:PATH`. A path of this machine with a colon in it is written with a slash before that. */
function placeOf(text: string): { readonly name: string; readonly path: string } | undefined {
  const match = /^([a-z0-9][a-z0-9_.-]{0,110}):(.+)$/s.exec(text);
  return match === null ? undefined : { name: match[1]!, path: match[2]!.startsWith('/') ? match[2]! : `/${match[2]}` };
}

function lastName(path: string): string {
  return path.replace(/\/+$/, '').split('/').at(-1)!;
}

async function isFolder(client: SandboxClient, name: string, path: string): Promise<boolean> {
  if (path.endsWith('/')) return true;
  try {
    return (await client.stat(name, path)).kind === 'directory';
  } catch (error) {
    if (isDsecError(error, 'RUNTIME_FILE')) return false;
    throw error;
  }
}

async function hostTarget(to: string, from: string): Promise<string> {
  const folder = await stat(to).then(
    (found) => found.isDirectory(),
    () => to.endsWith('/'),
  );
  return folder ? resolve(to, lastName(from)) : resolve(to);
}
