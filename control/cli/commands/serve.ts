/** `dsec serve`: services of a node. */
import { homedir } from 'node:os';
import { isAbsolute, join } from 'node:path';
import type { Command } from 'commander';
import { serveImages } from '#imagesvc';
import { blobsInUse } from '../../blobs-in-use.ts';
import { fail } from '../../errors.ts';
import { RuntimeService } from '../../runtime-service/service.ts';
import { choice } from '../choice.ts';
import type { CommandDefinition } from '../command.ts';
import type { Context } from '../context.ts';
import { parseDuration } from '../duration.ts';
import { repeated } from '../repeated.ts';
import { openChosenStore, type StoreOption, withStore } from '../store-option.ts';
import { projectRoot, projectVersion } from '../version.ts';
import { chooseVmDriver, VM_DRIVER_HELP } from '../vm-driver-option.ts';
import { addServeAll } from './serve-all.ts';
import { addServeApiserver } from './serve-apiserver.ts';
import { addServeEdge } from './serve-edge.ts';
import { addServeFnCall } from './serve-fncall.ts';
import { serveUblkd } from './serve-ublkd.ts';
import { addServeWatcher } from './serve-watcher.ts';

const LEVELS = ['trace', 'debug', 'info', 'warn', 'error', 'fatal', 'silent'] as const;

interface Options extends StoreOption {
  readonly listen: string;
  readonly tokenFile?: string;
  readonly allowPath?: string[];
  readonly state?: string;
  readonly jobs: string;
  readonly jobsPerCaller: string;
  readonly drain: string;
  readonly logLevel: string;
  readonly idle?: string;
  readonly detach?: boolean;
  readonly vmDriver?: string;
}

export const definition: CommandDefinition = {
  description:
    'Runs the image service over HTTP: conversion jobs that survive a restart, the catalog, browsing without mounting, mounts of this machine, ' +
    'garbage collection, figures for Prometheus; GET /docs shows all of it. Callers are known by bearer tokens: a file with a line `NAME ROLE ' +
    'sha256:HEX` for each (roles: read, write, admin), or one token with all rights in $DSEC_SERVER_TOKEN. Without tokens it listens on a unix socket ' +
    'or on loopback only. Requests may name paths of this machine only below --allow-path. SIGHUP reads the tokens again; SIGTERM ends it: ' +
    'running jobs have a moment, and what is not done then goes on at the next start.\n\n' +
    'Or, as `dsec serve runtime`, stays so that `dsec run` of root on this machine starts at once: it takes the whole command over a unix socket in the run ' +
    'folder and runs it with the same options, output and exit status. What it cannot do for another process (another version, another ' +
    'environment, crun or runc asked for) that process does itself, as without a service. A client that dies ends its sandbox; SIGTERM lets ' +
    'sandboxes run for --drain and ends those that still run.\n\n' +
    'Or, as `dsec serve ublkd`, serves the disks of `dsec disk attach` (docs/ublkd.md). What is attached stays so when it ends or dies: the next one opens ' +
    'the disks again, takes ublk devices over while their requests wait, and listens for NBD clients where they were. SIGTERM ends it; with ' +
    '--detach nothing stays attached then.\n\n' +
    'The services of a cluster are commands of their own, below: `dsec serve edge --help` (docs/cluster.md).',
  examples: [
    { line: 'dsec serve imagesvc', what: 'on 127.0.0.1:7070, for this machine' },
    {
      line: 'dsec serve imagesvc --listen 0.0.0.0:7070 --token-file /etc/dsec/tokens --store /srv/store',
      what: 'for other machines; TLS is the business of a proxy before it',
    },
    {
      line: 'dsec serve imagesvc --listen unix:/run/dsec/imagesvc.sock --allow-path /srv/images',
      what: 'on a socket; requests may name layouts in /srv/images',
    },
    { line: 'sudo dsec serve runtime', what: '`dsec run` of root starts at once from now on' },
    { line: 'sudo dsec serve ublkd', what: 'the disks that are attached, and those that will be' },
  ],
  configure(command, context) {
    const { output, takeSignals, defer } = context;
    // What stands behind the name of one of these is its own.
    command.enablePositionalOptions();
    addServeAll(command, context);
    addServeApiserver(command, context);
    addServeEdge(command, context);
    addServeFnCall(command, context);
    addServeWatcher(command, context);
    withStore(command)
      .argument('<service>', 'imagesvc, runtime or ublkd')
      .option('--listen <address>', 'HOST:PORT or unix:/path', '127.0.0.1:7070')
      .option('--token-file <file>', 'who may call, and what they may do')
      .option(
        '--allow-path <folder>',
        'a folder of this machine that requests may name; may be given several times',
        repeated,
      )
      .option('--state <folder>', 'where jobs are kept (default: $DSEC_STATE/imagesvc, else that of this user)')
      .option('--jobs <n>', 'how many run at once', '2')
      .option('--jobs-per-caller <n>', 'how many one caller may have waiting and running', '32')
      .option('--drain <time>', 'how long running jobs may go on after SIGTERM', '10s')
      .option('--log-level <level>', `of the log on stderr: ${LEVELS.join(', ')}`, 'info')
      .option('--vm-driver <name>', `runtime: ${VM_DRIVER_HELP}`)
      .option('--idle <time>', 'ublkd: end when nothing has been attached for so long (default: never)')
      .option('--detach', 'ublkd: at its end detach all disks, instead of leaving them to the next one')
      .action(async (service: string, options: Options) => {
        const drainMs = parseDuration('--drain', options.drain);
        if (service === 'runtime') {
          refuseOthers(command, service, ['drain', 'vmDriver']);
          chooseVmDriver(options.vmDriver);
          return serveRuntime(context, drainMs);
        }
        if (service === 'ublkd') {
          refuseOthers(command, service, ['idle', 'detach', 'logLevel']);
          return serveUblkd(context, {
            logLevel: choice('--log-level', options.logLevel, LEVELS),
            idleMs: options.idle === undefined ? undefined : parseDuration('--idle', options.idle),
            detach: options.detach === true,
          });
        }
        if (service !== 'imagesvc') {
          throw fail('CLI_USAGE', {
            problem: `there is no service "${service}": it is imagesvc, runtime or ublkd, or one of a cluster: \`dsec serve --help\` lists them`,
            program: 'dsec serve',
          });
        }
        for (const name of ['idle', 'detach', 'vmDriver']) {
          if (command.getOptionValueSource(name) === 'cli') refuseOption(service, name);
        }
        const store = await openChosenStore(options);
        const serving = await serveImages({
          store,
          listen: options.listen,
          stateDir: options.state ?? defaultStateDir(),
          version: projectVersion(),
          tokenFile: options.tokenFile,
          token: process.env.DSEC_SERVER_TOKEN,
          allowedPaths: options.allowPath,
          concurrency: numberOf('--jobs', options.jobs),
          jobsPerCaller: numberOf('--jobs-per-caller', options.jobsPerCaller),
          logLevel: choice('--log-level', options.logLevel, LEVELS),
          moreInUse: () => blobsInUse(store),
        });
        // However the command ends: jobs go back to the queue, and the socket file goes.
        defer(() => serving.close(0));
        await new Promise<void>((done) => {
          let ending = false;
          takeSignals((signal) => {
            if (signal === 'SIGHUP') return serving.reloadTokens();
            if (ending) return done();
            ending = true;
            serving.close(drainMs).then(done, done);
          });
          output.line(`image service at ${serving.url}, store ${store.url}`);
        });
      });
  },
};

function refuseOthers(command: Command, service: string, own: readonly string[]): void {
  for (const name of Object.keys(command.opts())) {
    if (!own.includes(name) && command.getOptionValueSource(name) === 'cli') refuseOption(service, name);
  }
}

function refuseOption(service: string, name: string): never {
  const option = `--${name.replace(/[A-Z]/g, (letter) => `-${letter.toLowerCase()}`)}`;
  const what = service === 'runtime' ? 'the runtime service' : service;
  throw fail('CLI_USAGE', { problem: `${what} has no option ${option}`, program: 'dsec serve' });
}

async function serveRuntime({ output, takeSignals, defer, isFresh }: Context, drainMs: number): Promise<void> {
  const self = { root: projectRoot(), env: { ...process.env }, isFresh: isFresh ?? (() => true) };
  const service = await RuntimeService.start({ self, note: (text) => output.note(`dsec: ${text}`) });
  let closing: Promise<void> | undefined;
  const close = (ms: number) => {
    closing ??= service.close(ms);
    return closing;
  };
  defer(() => close(0));
  await new Promise<void>((done) => {
    takeSignals((signal) => {
      // A terminal that goes away takes a service in the foreground with it; there is nothing to read again.
      if (closing !== undefined) return done();
      output.note(`dsec: ${signal}: ending${service.busy > 0 ? `; ${service.busy} sandboxes have ${drainMs} ms` : ''}`);
      close(drainMs).then(done, done);
    });
    output.line(`runtime service at unix:${service.socket}`);
  });
}

function defaultStateDir(env: NodeJS.ProcessEnv = process.env): string {
  if (env.DSEC_STATE) return join(env.DSEC_STATE, 'imagesvc');
  if (process.getuid?.() === 0) return '/var/lib/dsec/imagesvc';
  // XDG base directories: a relative path there is to be ignored.
  const state =
    env.XDG_STATE_HOME && isAbsolute(env.XDG_STATE_HOME) ? env.XDG_STATE_HOME : join(homedir(), '.local/state');
  return join(state, 'dsec/imagesvc');
}

function numberOf(option: string, text: string): number {
  if (!/^[1-9]\d{0,5}$/.test(text)) {
    throw fail('CLI_USAGE', { problem: `${option} ${text}: a number from 1`, program: 'dsec serve' });
  }
  return Number(text);
}
