/** `dsec serve ublkd`: the block service in the foreground. */
import { storeLayerOpener } from '../../disk-layers.ts';
import { serviceFolders } from '../../ublkd-service/folders.ts';
import { serveDisks } from '../../ublkd-service/serve.ts';
import type { Context } from '../context.ts';

export interface UblkdCommand {
  readonly logLevel: string;
  readonly idleMs?: number;
  readonly detach: boolean;
}

export async function serveUblkd(
  { output, takeSignals, defer }: Context,
  { logLevel, idleMs, detach }: UblkdCommand,
): Promise<void> {
  let tell = () => {};
  const told = new Promise<void>((done) => {
    tell = done;
  });
  let isTold = false;
  // Also while disks are taken over: a process that ends in the middle would leave threads that wait for the kernel.
  takeSignals((signal) => {
    // Nothing is read again; and disks do not go with a terminal that somebody closes.
    if (signal === 'SIGHUP') return;
    // Told twice it ends at once. That loses nothing: the next one takes over, as after any death.
    if (isTold) process.kill(process.pid, 'SIGKILL');
    isTold = true;
    tell();
  });
  const serving = await serveDisks({ folders: serviceFolders(), logLevel, idleMs, layers: storeLayerOpener() });
  let closing: Promise<void> | undefined;
  const close = (how?: { detach?: boolean }) => {
    closing ??= serving.close(how);
    return closing;
  };
  defer(() => close());
  const disks = serving.daemon.list();
  const failed = disks.filter(({ state }) => state === 'failed').length;
  const count = `${disks.length} attached${failed > 0 ? `, ${failed} of them not served` : ''}`;
  await output.line(`block service at unix:${serving.socket}, ${count}`);
  await Promise.race([told, serving.idle]);
  await close({ detach: isTold && detach });
}
