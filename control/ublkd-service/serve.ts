/** `dsec serve ublkd`: the daemon behind its socket, until it is told to end, or nothing has been attached for a while. */
import { mkdirSync } from 'node:fs';
import { dirname } from 'node:path';
import { listenHttp, parseListenAddress } from '#imagesvc';
import { DiskDaemon } from '#ublk-daemon';
import { projectVersion } from '../cli/version.ts';
import type { StoreLayerOpener } from '../disk-layers.ts';
import type { ServiceFolders } from './folders.ts';

export interface UblkdOptions {
  readonly folders: ServiceFolders;
  readonly logLevel: string;
  /** Opens layers that are in stores. */
  readonly layers?: StoreLayerOpener;
  /** Ends by itself when nothing has been attached and nobody has asked for so long. */
  readonly idleMs?: number;
}

export interface ServingDisks {
  readonly socket: string;
  readonly daemon: DiskDaemon;
  /** Resolves when it has ended by itself. */
  readonly idle: Promise<void>;
  close(options?: { detach?: boolean }): Promise<void>;
}

const CHECK_MS = 1000;

/** @throws UBLKD_RUNS_ALREADY, UBLKD_TABLE, SERVER_LISTEN */
export async function serveDisks(options: UblkdOptions): Promise<ServingDisks> {
  // Only who serves pays for loading it.
  const { createApp, logTo } = await import('./app.ts');
  const { folders, logLevel, layers, idleMs } = options;
  const { stateDir, runDir, socket } = folders;
  const logger = logTo(2, logLevel);
  mkdirSync(dirname(socket), { recursive: true, mode: 0o755 });
  const daemon = await DiskDaemon.start({
    stateDir,
    runDir,
    openStoreLayer: layers,
    log: (level, text, facts) => logger[level](facts, text),
  });
  let app: Awaited<ReturnType<typeof createApp>> | undefined;
  try {
    app = await createApp(daemon, { version: projectVersion(), logger, layers });
    await listenHttp(app, parseListenAddress(`unix:${socket}`));
  } catch (error) {
    await daemon.close();
    await app?.close();
    throw error;
  }
  const serving = app;
  let lastUse = Date.now();
  const idle = new Promise<void>((done) => {
    if (idleMs === undefined) return;
    serving.server.on('connection', () => {
      lastUse = Date.now();
    });
    setInterval(() => {
      if (daemon.size > 0) lastUse = Date.now();
      else if (Date.now() - lastUse >= idleMs) done();
    }, CHECK_MS).unref();
  });
  return {
    socket,
    daemon,
    idle,
    async close(how) {
      // Nobody new; what is at work has its answer: layers that are being written are given up by the daemon.
      const closed = serving.close();
      await daemon.close(how);
      serving.server.closeAllConnections();
      await closed;
    },
  };
}
