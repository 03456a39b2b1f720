/** `dsec serve`: services of a node. */
import { homedir } from 'node:os';
import { isAbsolute, join } from 'node:path';
import { serveImages } from '#imagesvc';
import { blobsInUse } from '../../blobs-in-use.ts';
import { fail } from '../../errors.ts';
import { choice } from '../choice.ts';
import type { CommandDefinition } from '../command.ts';
import { parseDuration } from '../duration.ts';
import { repeated } from '../repeated.ts';
import { openChosenStore, type StoreOption, withStore } from '../store-option.ts';
import { projectVersion } from '../version.ts';

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
}

export const definition: CommandDefinition = {
  description:
    'Runs the image service over HTTP: conversion jobs that survive a restart, the catalog, browsing without mounting, mounts of this machine, ' +
    'garbage collection, figures for Prometheus; GET /docs shows all of it. Callers are known by bearer tokens: a file with a line `NAME ROLE ' +
    'sha256:HEX` for each (roles: read, write, admin), or one token with all rights in $DSEC_SERVER_TOKEN. Without tokens it listens on a unix socket ' +
    'or on loopback only. Requests may name paths of this machine only below --allow-path. SIGHUP reads the tokens again; SIGTERM ends it: ' +
    'running jobs have a moment, and what is not done then goes on at the next start.',
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
  ],
  configure(command, { output, takeSignals, defer }) {
    withStore(command)
      .argument('<service>', 'imagesvc')
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
      .action(async (service: string, options: Options) => {
        if (service !== 'imagesvc') {
          throw fail('CLI_USAGE', {
            problem: `there is no service "${service}", only imagesvc`,
            program: 'dsec serve',
          });
        }
        const drainMs = parseDuration('--drain', options.drain);
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
