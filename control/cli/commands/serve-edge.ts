/** `dsec serve edge`: the sandboxes of this machine, for a cluster. */
import type { Command } from 'commander';
import { admissionLimits, CPU_OVERCOMMIT } from '../../edge/capacity.ts';
import { gpuCards } from '../../edge/gpu-cards.ts';
import { serveEdge } from '../../edge/serve-edge.ts';
import { fail } from '../../errors.ts';
import { choice } from '../choice.ts';
import type { Context } from '../context.ts';
import { parseDuration } from '../duration.ts';
import { withExamples } from '../examples.ts';
import { repeated } from '../repeated.ts';
import { type ServiceOptionValues, serveUntilSignal, serviceSettings, withServiceOptions } from '../service-options.ts';
import { projectRoot } from '../version.ts';
import { chooseVmDriver, VM_DRIVER_HELP } from '../vm-driver-option.ts';

interface Options extends ServiceOptionValues {
  readonly id?: string;
  readonly label?: string[];
  readonly gpu?: string[];
  readonly gpuInstances: string;
  readonly capacity?: string;
  readonly reserve?: string;
  readonly pressure?: string;
  readonly store?: string;
  readonly watcher?: string;
  readonly advertise?: string;
  readonly keepEnded: string;
  readonly vmDriver?: string;
}

const PROGRAM = 'dsec serve edge';

export function addServeEdge(serve: Command, context: Context): void {
  const command = serve.command('edge').summary('the sandboxes of this machine, for a cluster');
  command.description(
    'Makes this machine a node of a cluster: its sandboxes over HTTP, for the API server (docs/cluster.md). Takes a sandbox or refuses it, by what it has promised ' +
      'and how hard the machine is pressed. It is the runtime service of the machine as well: where `dsec serve runtime` runs, end that first. Sandboxes go on when ' +
      'it ends or dies; the next one has them. SIGHUP reads certificates again.',
  );
  withServiceOptions(command, { listen: '127.0.0.1:7071' })
    .option('--id <id>', 'part of the ids of its sandboxes (default: as before, else the name of the machine)')
    .option(
      '--label <label>',
      'what sandboxes may ask for, such as gpu or zone-a; may be given several times',
      repeated,
    )
    .option(
      '--gpu <kind=devices>',
      'a graphics processor that a sandbox may have: KIND=/dev/NODE[,/dev/NODE...]; once for each (default: those that nvidia-smi lists)',
      repeated,
    )
    .option(
      '--gpu-instances <who>',
      'who gets the instances of divided graphics processors (MIG): tasks or sandboxes',
      'tasks',
    )
    .option(
      '--capacity <amounts>',
      `cpus=N,memory=SIZE,disk=SIZE,gpus=N,sandboxes=N that it promises (default: ${CPU_OVERCOMMIT} times the processors, the memory, the disk)`,
    )
    .option('--reserve <shares>', 'memory=0.05,disk=0.05: with less than this free it takes nothing')
    .option(
      '--pressure <shares>',
      'cpu=1,memory=0.5,io=0.95: with work waiting for a larger part of ten seconds it takes nothing; 1: never mind',
    )
    .option('--store <url>', 'of images whose store is not named (default: $DSEC_STORE, else this user’s)')
    .option('--vm-driver <name>', VM_DRIVER_HELP)
    .option('--watcher <url>', 'make it known to this watcher')
    .option('--advertise <url>', 'where others reach it (default: where it listens)')
    .option('--keep-ended <time>', 'remove a sandbox so long after it has ended', '1h')
    .action(async (options: Options) => {
      chooseVmDriver(options.vmDriver);
      const settings = serviceSettings(options, PROGRAM);
      const keepEndedMs = parseDuration('--keep-ended', options.keepEnded);
      if (options.advertise !== undefined && options.watcher === undefined) {
        throw fail('CLI_USAGE', { problem: '--advertise is told to a --watcher', program: PROGRAM });
      }
      const { capacity, reserve, pressure } = options;
      const instances = choice('--gpu-instances', options.gpuInstances, ['tasks', 'sandboxes']) === 'sandboxes';
      if (instances && options.gpu !== undefined) {
        throw fail('CLI_USAGE', { problem: '--gpu says which there are; leave --gpu-instances out', program: PROGRAM });
      }
      const cards = await gpuCards(options.gpu, instances);
      const edge = await serveEdge({
        ...settings,
        self: { root: projectRoot(), env: { ...process.env }, isFresh: context.isFresh ?? (() => true) },
        id: options.id,
        labels: options.label ?? [],
        cards,
        gpusOfTasks: instances ? 'none' : 'instances',
        limits: (stateDir) => admissionLimits({ capacity, reserve, pressure, stateDir, cards: cards.length }),
        storeUrl: options.store,
        keepEndedMs,
        watcherUrl: options.watcher,
        advertise: options.advertise,
      });
      await serveUntilSignal(context, edge, { line: `edge ${edge.id} at ${edge.url}`, drainMs: settings.drainMs });
    });
  withExamples(command, [
    { line: 'sudo dsec serve edge --cluster-token-file /etc/dsec/cluster-token', what: 'on this machine alone' },
    {
      line: 'sudo dsec serve edge --listen 10.0.0.5:7071 --watcher http://10.0.0.1:7072 --label ssd --cluster-token-file /etc/dsec/cluster-token',
      what: 'a node of a cluster',
    },
  ]);
}
