/** `dsec serve fncall`: tasks over HTTP, for programs that are given a URL. */
import type { Command } from 'commander';
import { defaultStoreUrl } from '#imagesvc';
import { fail } from '../../errors.ts';
import { DEFAULT_POOL } from '../../fncall/fncall-host.ts';
import { serveFnCall } from '../../fncall/serve-fncall.ts';
import type { Context } from '../context.ts';
import { withExamples } from '../examples.ts';
import { type PoolFlags, poolAsked, withPoolOptions } from '../fncall-options.ts';
import { type ServiceOptionValues, serveUntilSignal, serviceSettings, withServiceOptions } from '../service-options.ts';

const PROGRAM = 'dsec serve fncall';

export function addServeFnCall(serve: Command, context: Context): void {
  const command = serve.command('fncall').summary('short tasks (FnCall) over HTTP, in SandboxFusion’s dialect too');
  command.description(
    'Runs short tasks over HTTP in containers that are there already (docs/fncall.md): POST /v1/fncall/run, and POST /run_code as SandboxFusion has it, so that its ' +
      'clients need only the URL. Needs root. On loopback and on a unix socket it asks for no token; elsewhere callers show that of --cluster-token-file. ' +
      'The runtime service and edges of a cluster have the same routes.',
  );
  withPoolOptions(withServiceOptions(command, { listen: '127.0.0.1:7074' }))
    .requiredOption('--image <name>', 'of the pool for calls that name none')
    .action(async (options: ServiceOptionValues & PoolFlags) => {
      if (process.geteuid?.() !== 0) throw fail('SERVE_NEEDS_ROOT');
      const { listen, tls, token, logLevel, drainMs } = serviceSettings(options, PROGRAM);
      const pools = { [DEFAULT_POOL]: poolAsked(options, PROGRAM) };
      const storeUrl = options.store ?? defaultStoreUrl();
      const serving = await serveFnCall({ listen, tls, token, logLevel, storeUrl, pools });
      await serveUntilSignal(context, serving, { line: `fncall at ${serving.url}`, drainMs });
    });
  withExamples(command, [
    { line: 'sudo dsec serve fncall --image python --floor 2', what: 'on 127.0.0.1:7074, two containers ready' },
    {
      line: 'sudo dsec serve fncall --image judge --ceiling 32 --python-import numpy',
      what: 'a Python with numpy imported waits in each container',
    },
  ]);
}
