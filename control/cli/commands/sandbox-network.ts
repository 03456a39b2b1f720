/** `dsec sandbox network`: what a sandbox may reach, has reached, and was denied. */
import type { Command } from 'commander';
import type { DeniedAttempt, NetworkCounters, NetworkPolicy, NetworkView, WrittenRule } from '#runtime';
import { fail } from '../../errors.ts';
import { choice } from '../choice.ts';
import type { Context } from '../context.ts';
import { withExamples } from '../examples.ts';
import { type PolicyOptions, policyOf, withPolicyOptions } from '../network-options.ts';
import { sandboxClient } from '../sandbox-client-of.ts';
import { type JsonOption, withJson } from '../store-option.ts';

type Output = Context['output'];

const WHAT = ['show', 'set', 'denied', 'counters'] as const;
const PROGRAM = 'dsec sandbox network';

interface NetworkCommand extends JsonOption, PolicyOptions {
  readonly last?: string;
}

export function addNetworkCommand(command: Command, context: Context): void {
  const { output } = context;
  const network = withExamples(
    command
      .command('network')
      .description(
        'The network of a sandbox made by `dsec sandbox create --network policy`. show: its rules and addresses; set: other rules, in place of all that it had, which hold at once, in one step: connections that they do not ' +
          'allow end, others are not interrupted; denied: what it tried and may not, and which program it was, oldest first; counters: how much it has sent, and how much of that was denied.',
      ),
    [
      { line: 'dsec sandbox network work', what: 'its rules' },
      { line: 'dsec sandbox network work set --allow @pypi --allow 10.2.0.0/16:443', what: 'a service and a range' },
      { line: 'dsec sandbox network work set --default deny', what: 'nothing any more' },
      { line: 'dsec sandbox network work denied --last 1000 --json', what: 'for a program' },
      { line: 'dsec sandbox network work --json | jq .policy > policy.json', what: 'to change it in a file' },
    ],
  );
  withPolicyOptions(withJson(network))
    .argument('<name>', 'as `dsec sandbox ls` shows it')
    .argument('[what]', WHAT.join(', '), 'show')
    .option('--last <n>', 'with denied: so many at most, up to 10000 (100)')
    .action(async (name: string, given: string, { json = false, last, ...options }: NetworkCommand) => {
      const what = choice('what', given, WHAT);
      const policy = policyOf(options, PROGRAM);
      if ((what === 'set') !== (policy !== undefined)) {
        const problem =
          what === 'set' ? 'set: no rules: give --policy, --allow, --deny or --default' : 'rules are for set';
        throw fail('CLI_USAGE', { problem, program: PROGRAM });
      }
      if (last !== undefined && what !== 'denied')
        throw fail('CLI_USAGE', { problem: '--last is for denied', program: PROGRAM });
      const client = sandboxClient(context);
      switch (what) {
        case 'show':
          return show(await client.network(name), output, json);
        case 'set': {
          const view = await client.setNetwork(name, policy!);
          return json ? output.json(view) : undefined;
        }
        case 'denied':
          return denied(await client.networkDenied(name, countOf(last)), output, json);
        case 'counters':
          return counters(await client.networkCounters(name), output, json);
      }
    });
}

function countOf(last = '100'): number {
  if (!/^[1-9]\d{0,4}$/.test(last) || Number(last) > 10_000) {
    throw fail('CLI_USAGE', { problem: `--last ${last}: a number from 1 to 10000`, program: PROGRAM });
  }
  return Number(last);
}

async function show(view: NetworkView, output: Output, json: boolean): Promise<void> {
  if (json) return output.json(view);
  await output.line(`network: ${view.mode}`);
  if (view.policy === undefined) return;
  await output.line(`addresses: ${view.ipv4} ${view.ipv6}`);
  for (const line of policyLines(view.policy)) await output.line(line);
}

async function denied(attempts: readonly DeniedAttempt[], output: Output, json: boolean): Promise<void> {
  if (json) return output.json(attempts);
  if (attempts.length === 0) return output.note('nothing was denied');
  await output.table(
    [
      { title: 'TIME' },
      { title: 'TIMES', right: true },
      { title: 'WHAT' },
      { title: 'DESTINATION' },
      { title: 'REASON' },
      { title: 'PROGRAM' },
    ],
    attempts.map((attempt) => [
      attempt.time,
      String(attempt.count),
      attempt.kind === 'name' ? `name ${attempt.protocol}` : attempt.protocol,
      destinationOf(attempt),
      attempt.reason,
      attempt.program === undefined ? '' : `${attempt.program} (${attempt.pid})`,
    ]),
  );
}

async function counters(counted: NetworkCounters, output: Output, json: boolean): Promise<void> {
  if (json) return output.json(counted);
  await output.line(`allowed: ${counted.allowedPackets} packets, ${counted.allowedBytes} bytes`);
  await output.line(`denied: ${counted.deniedPackets} packets, ${counted.deniedBytes} bytes`);
  await output.line(`denied and not logged: ${counted.unloggedPackets} packets`);
  await output.line(`addresses opened by names: ${counted.openedAddresses}`);
}

function policyLines({ default: preset, rules, services }: NetworkPolicy): string[] {
  return [
    ...rules.map((rule) => ruleLine(rule)),
    ...Object.entries(services).map(([name, isOpen]) => `${isOpen ? 'allow' : 'deny'} @${name}`),
    `${preset} everything else`,
  ];
}

function ruleLine({ allow, deny, ports, protocol, inside }: WrittenRule): string {
  const scope = ports === undefined ? '' : ` ports ${ports.join(',')}`;
  const kind = protocol === undefined ? '' : ` ${protocol}`;
  return `${allow === undefined ? 'deny' : 'allow'} ${allow ?? deny}${scope}${kind}${inside ? ' inside' : ''}`;
}

function destinationOf({ destination, port, name }: DeniedAttempt): string {
  const host = destination.includes(':') ? `[${destination}]` : destination;
  const where = port === undefined ? destination : `${host}:${port}`;
  return name === undefined ? where : `${where} (${name})`;
}
