/** `dsec vm template`: what virtual machines begin from, instead of booting. */
import type { Command } from 'commander';
import { humanSize } from '#base';
import { findAgent, prepareTemplate, removeTemplate, runtimeFolders, templateStates } from '#runtime';
import { fail } from '../../errors.ts';
import type { Context } from '../context.ts';
import { withExamples } from '../examples.ts';
import { parseSize } from '../size.ts';
import { type JsonOption, withJson } from '../store-option.ts';

type Template = ReturnType<typeof templateStates>[number];

interface MakeOptions extends JsonOption {
  readonly cpus?: string;
  readonly memory?: string;
  readonly reporting: boolean;
}

export function addVmTemplate(vm: Command, { output, signal }: Context): void {
  const template = vm
    .command('template')
    .description(
      'Templates: snapshots of guests that have booted and wait to be told what they are. `dsec serve runtime` and `dsec serve edge` make one for each size of machine that ' +
        'is asked for twice, and begin machines from it; $DSEC_VM_POOL=off has all of them boot. They are kept below $DSEC_STATE, 8 at most, and are of no use once kernel, agent or QEMU change.',
    );
  const list = withExamples(template.command('ls').description('Those of this node, used last first.'), [
    { line: 'sudo dsec vm template ls', what: 'which sizes of machines need not boot' },
  ]);
  withJson(list).action(async ({ json }: JsonOption) => {
    const templates = templateStates(runtimeFolders(), findAgent()?.path);
    if (json) return output.json(templates.map(viewOf));
    const columns = ['TEMPLATE', 'CPUS', 'MEMORY', 'KERNEL', 'SIZE', 'LAST USED', ''].map((title) => ({ title }));
    await output.table(
      columns,
      templates.map((one) => [
        one.key,
        String(one.cpus),
        humanSize(one.memoryBytes),
        one.kernel,
        humanSize(one.bytes),
        viewOf(one).usedAt,
        one.isUseful === false ? 'of no use any more' : '',
      ]),
    );
  });
  const make = withExamples(
    template
      .command('make')
      .description('Makes one before anybody asks: boots a machine of that size once. One that is there is taken.')
      .option('--cpus <n>', 'as of `dsec sandbox create`, with the same default')
      .option('--memory <size>', 'as of `dsec sandbox create`, with the same default')
      .option('--no-reporting', 'for sandboxes without free page reporting: they share its memory'),
    [{ line: 'sudo dsec vm template make --cpus 1 --memory 512MiB', what: 'such machines begin at once from now on' }],
  );
  withJson(make).action(async ({ cpus, memory, reporting, json }: MakeOptions) => {
    const agent = findAgent();
    if (agent === undefined) throw fail('SERVE_NO_LAUNCHER');
    const wish = {
      cpus: cpus === undefined ? undefined : processors(cpus),
      memoryBytes: memory === undefined ? undefined : parseSize('--memory', memory),
      reporting: reporting ? undefined : false,
    };
    const made = await prepareTemplate(wish, runtimeFolders(), agent.path, signal);
    if (json) await output.json(viewOf(made));
    else await output.line(`${made.key}: ${made.cpus} processors, ${humanSize(made.memoryBytes)} of memory`);
  });
  const remove = withExamples(
    template
      .command('rm')
      .description('Takes templates away. Machines that began from them go on.')
      .argument('[template...]', 'as `ls` names them')
      .option('--all', 'all of them')
      .option('--unused', 'those that are of no use any more'),
    [{ line: 'sudo dsec vm template rm --unused', what: 'after kernel, agent or QEMU have changed' }],
  );
  remove.action(async (keys: string[], { all = false, unused = false }: { all?: boolean; unused?: boolean }) => {
    const folders = runtimeFolders();
    const templates = templateStates(folders, findAgent()?.path);
    for (const key of keys) {
      if (!templates.some((one) => one.key === key))
        throw fail('CLI_USAGE', {
          problem: `there is no template ${key}: \`dsec vm template ls\``,
          program: 'dsec vm',
        });
    }
    if (keys.length === 0 && !all && !unused)
      throw fail('CLI_USAGE', { problem: 'name templates, or --all, or --unused', program: 'dsec vm template rm' });
    for (const one of templates) {
      if (!keys.includes(one.key) && !all && !(unused && one.isUseful === false)) continue;
      removeTemplate(folders.stateDir, one.key);
      await output.line(one.key);
    }
  });
}

function viewOf({ key, cpus, memoryBytes, reporting, kernel, made, usedMs, bytes, isUseful }: Template) {
  const usedAt = new Date(usedMs).toISOString();
  return { template: key, cpus, memoryBytes, reporting, kernel, madeAt: made, usedAt, bytes, useful: isUseful ?? null };
}

function processors(text: string): number {
  const cpus = Number(text);
  if (Number.isFinite(cpus) && cpus > 0) return cpus;
  throw fail('CLI_USAGE', { problem: `--cpus ${text}: a number above 0`, program: 'dsec vm template make' });
}
