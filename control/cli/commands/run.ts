/** `dsec run`: a command in a container of its own, on top of images. */
import { openImage } from '#imagesvc';
import { runContainer } from '#runtime';
import { fail } from '../../errors.ts';
import type { CommandDefinition } from '../command.ts';
import { repeated } from '../repeated.ts';
import { type JsonOption, openChosenStore, type StoreOption, withStore } from '../store-option.ts';

interface Options extends StoreOption, JsonOption {
  readonly workspace?: string;
  readonly toolkit?: string[];
  readonly name?: string;
  readonly keep?: boolean;
  readonly replace?: boolean;
  readonly env?: string[];
  readonly user?: string;
  readonly workdir?: string;
  readonly entrypoint?: string;
  readonly tty?: boolean;
  readonly network: string;
}

export const definition: CommandDefinition = {
  description:
    "Runs a command in a container: the base image's layers at the bottom, then the workspace, then the toolkits, the last one topmost, and " +
    'above them a writable folder of its own. Without a command it runs what the image says. Standard streams, signals and the exit status pass ' +
    'through. The container and its changes are removed at the end, unless --keep is given; then `dsec pack-diff` makes an image of the changes. ' +
    'Needs root and crun or runc. Its own failures: 125 not started, 126 not executable, 127 not found.',
  examples: [
    { line: "dsec run alpine:3.20 -- sh -c 'echo hello'", what: 'a command' },
    {
      line: 'dsec run base:1 --workspace repo:1 --toolkit node:20 --name work --keep -- npm test',
      what: 'composed of three images, its changes kept',
    },
    { line: 'dsec run -t alpine:3.20 -- sh', what: 'a shell on this terminal' },
  ],
  configure(command, context) {
    withStore(command)
      .usage('[options] <image> [-- command...]')
      .argument('<image>', 'the base: name or digest')
      .argument('[command...]', 'what to run, after --')
      .option('--workspace <image>', 'an image of kind workspace, above the base')
      .option('--toolkit <image>', 'an image of kind toolkit, above that; may be given several times', repeated)
      .option('--name <name>', 'what the container is called; a random name by default')
      .option('--keep', 'keep its changes when the command has ended')
      .option('--replace', 'first remove a kept container of the same name')
      .option(
        '-e, --env <variable>',
        'NAME=VALUE, or NAME to pass on what it is here; may be given several times',
        repeated,
      )
      .option('-u, --user <user>', 'name, uid, name:group or uid:gid')
      .option('-w, --workdir <folder>', 'where the command starts')
      .option('--entrypoint <program>', "in place of the image's")
      .option('-t, --tty', 'give it this terminal')
      .option('--network <mode>', 'none: loopback alone; host: that of this machine', 'none')
      .option('--json', 'print what came of it as the last line on stderr')
      .action(async (name: string, args: string[], options: Options) => {
        const { network } = options;
        if (network !== 'none' && network !== 'host') {
          throw fail('CLI_USAGE', { problem: `--network ${network}: it is none or host`, program: 'dsec run' });
        }
        const store = await openChosenStore(options);
        const result = await runContainer({
          store,
          base: await openImage(store, name),
          workspace: options.workspace === undefined ? undefined : await openImage(store, options.workspace),
          toolkits: await Promise.all((options.toolkit ?? []).map((toolkit) => openImage(store, toolkit))),
          name: options.name,
          keep: options.keep ?? false,
          replace: options.replace ?? false,
          command: args,
          entrypoint: options.entrypoint === undefined ? undefined : [options.entrypoint],
          env: options.env,
          user: options.user,
          workdir: options.workdir,
          terminal: options.tty ?? false,
          network,
          signal: context.signal,
          takeSignals: context.takeSignals,
        });
        if (options.json) context.output.note(JSON.stringify(result));
        else if (result.upper !== undefined) {
          context.output.note(
            `dsec: kept as ${result.name}; dsec pack-diff ${result.name} --name NAME:TAG makes an image of its changes`,
          );
        }
        context.exitCode = result.exitCode;
      });
  },
};
