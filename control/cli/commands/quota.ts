/** `dsec quota`: how much projects may use. */
import { humanSize } from '#base';
import { fail } from '../../errors.ts';
import type { Quota } from '../../iam/administration.ts';
import { RESOURCES, type Resource } from '../../iam/iam.ts';
import { apiConnection } from '../api-connection.ts';
import type { CommandDefinition } from '../command.ts';
import { withExamples } from '../examples.ts';
import { withApi } from '../sandbox-client-of.ts';
import { parseSize } from '../size.ts';
import { type JsonOption, withJson } from '../store-option.ts';

interface SetOptions extends JsonOption {
  readonly sandboxes?: string;
  readonly cpus?: string;
  readonly memory?: string;
  readonly disk?: string;
}

const SHOWN: Readonly<Record<Resource, (amount: number) => string>> = {
  sandboxes: String,
  cpuMilli: (milli) => String(milli / 1000),
  memoryBytes: humanSize,
  diskBytes: humanSize,
};

export const definition: CommandDefinition = {
  description:
    'A quota limits sandboxes, processors, memory and disk of a project and all below it together. What the projects below are given never comes to more than their ' +
    'parent has. A sandbox needs room in its project and in each one above it.',
  examples: [
    {
      line: 'dsec quota set root/team --sandboxes 1000 --cpus 200 --memory 500GiB',
      what: 'limits; what is not named stays',
    },
    { line: 'dsec quota set root/team --cpus none', what: 'takes one away' },
    { line: 'dsec quota ls root/team', what: 'limits, and what is in use, of it and all below it' },
  ],
  json: 'ls: an array, set: an object: `project`, and by `sandboxes`, `cpuMilli`, `memoryBytes`, `diskBytes`: `limits` (absent: none), `delegated`, `used`',
  configure(command, context) {
    const { output } = context;
    const api = (name: string) => apiConnection(context, `dsec quota ${name}`);
    const show = (quotas: readonly Quota[]) =>
      output.table(
        [{ title: 'PROJECT' }, ...['SANDBOXES', 'CPUS', 'MEMORY', 'DISK'].map((title) => ({ title, right: true }))],
        quotas.map(({ project, limits, used }) => [
          project,
          ...RESOURCES.map((resource) => {
            const limit = limits[resource];
            const text = SHOWN[resource];
            return `${text(used[resource])} / ${limit === undefined ? '-' : text(limit)}`;
          }),
        ]),
      );

    const ls = command
      .command('ls')
      .description('Shows use and limits of the projects that the caller may read; - is no limit of its own.');
    withExamples(withJson(ls), [{ line: 'dsec quota ls', what: 'all of them' }])
      .argument('[path]', 'only this project and those below it')
      .action(async (project: string | undefined, { json }: JsonOption) => {
        const { quotas } = await api('ls').json<{ quotas: Quota[] }>('GET', '/v1/quotas', { query: { project } });
        if (json) return output.json(quotas);
        await show(quotas);
      });

    const set = command
      .command('set')
      .description('Sets limits. Needs quota.admin on the parent: nobody raises what he was given.');
    withExamples(withJson(set), [
      { line: 'dsec quota set root/team --sandboxes 1000 --memory 500GiB', what: 'two limits' },
    ])
      .argument('<path>', 'the project')
      .option('--sandboxes <n>', 'how many; none: no limit of its own')
      .option('--cpus <n>', 'processors, 1.5')
      .option('--memory <size>', '500MiB, 2GiB')
      .option('--disk <size>', '10GiB')
      .action(async (project: string, { json, sandboxes, cpus, memory, disk }: SetOptions) => {
        const limits = {
          sandboxes: limitOf(sandboxes, (text) => whole('--sandboxes', text, 1)),
          cpuMilli: limitOf(cpus, (text) => whole('--cpus', text, 1000)),
          memoryBytes: limitOf(memory, (text) => parseSize('--memory', text)),
          diskBytes: limitOf(disk, (text) => parseSize('--disk', text)),
        };
        if (Object.values(limits).every((limit) => limit === undefined)) {
          throw usage('it needs one of --sandboxes, --cpus, --memory, --disk');
        }
        const quota = await api('set').json<Quota>('PUT', '/v1/quotas', { body: { project, limits } });
        if (json) return output.json(quota);
        await show([quota]);
      });
    withApi(command, context);
  },
};

function limitOf(text: string | undefined, parse: (text: string) => number): number | null | undefined {
  if (text === undefined) return undefined;
  return text === 'none' ? null : parse(text);
}

/** @throws CLI_USAGE */
function whole(option: string, text: string, factor: number): number {
  const amount = Math.round(Number(text) * factor);
  const isWhole = factor === 1 ? /^\d+$/.test(text) : /^\d+(\.\d{1,3})?$/.test(text);
  if (!isWhole || !Number.isSafeInteger(amount)) throw usage(`${option} ${text}: not a number`);
  return amount;
}

function usage(problem: string) {
  return fail('CLI_USAGE', { problem, program: 'dsec quota set' });
}
