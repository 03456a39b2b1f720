/**
 * Options for what a sandbox may reach: of `sandbox create` and `sandbox network set`. A policy is a file, with rules of the command line
 * added to it.
 */
import { readFileSync } from 'node:fs';
import type { Command } from 'commander';
import { messageOf } from '#base';
import {
  BUILT_IN_SERVICES,
  NETWORK_MODES,
  type NetworkMode,
  type NetworkPolicy,
  parsePolicy,
  type WrittenRule,
} from '#runtime';
import { fail } from '../errors.ts';
import { choice } from './choice.ts';
import { repeated } from './repeated.ts';

export interface PolicyOptions {
  readonly policy?: string;
  readonly allow?: string[];
  readonly deny?: string[];
  readonly default?: string;
}

export interface NetworkOptions extends PolicyOptions {
  readonly network?: string;
}

export function withPolicyOptions(command: Command): Command {
  return command
    .option('--policy <file>', 'a network policy (JSON, docs/network.md)')
    .option(
      '--allow <target>',
      'an address, a range, a name (*.example.org) or a service (@pypi), :PORTS behind it; may be given several times',
      repeated,
    )
    .option('--deny <target>', 'the same, closed; the smaller range decides, and of the same one this does', repeated)
    .option('--default <what>', 'for what no rule speaks of: deny or allow (deny)');
}

export function withNetworkOptions(command: Command): Command {
  const modes = 'none: loopback alone; policy: what the rules allow; host: that of this machine';
  return withPolicyOptions(command.option('--network <mode>', `${modes} (none; policy with one of the next)`));
}

/** As the service takes it; undefined: nothing was asked for. @throws CLI_USAGE, CLI_INPUT_*, RUNTIME_NETWORK_POLICY */
export function networkOf(
  { network, ...rest }: NetworkOptions,
  program: string,
): { readonly mode: NetworkMode; readonly policy?: NetworkPolicy } | undefined {
  const policy = policyOf(rest, program);
  const mode = choice('--network', network, NETWORK_MODES) ?? (policy === undefined ? undefined : 'policy');
  if (policy !== undefined && mode !== 'policy') {
    throw fail('CLI_USAGE', {
      problem: `--network ${mode}: it has no rules (--policy, --allow, --deny, --default)`,
      program,
    });
  }
  return mode === undefined ? undefined : { mode, policy };
}

/** Undefined without any of the options. @throws as `networkOf` */
export function policyOf(
  { policy, allow = [], deny = [], default: preset }: PolicyOptions,
  program: string,
): NetworkPolicy | undefined {
  if (policy === undefined && allow.length === 0 && deny.length === 0 && preset === undefined) return undefined;
  const written = policy === undefined ? parsePolicy({}) : parsePolicy(readJson(policy));
  const services: Record<string, boolean> = { ...written.services };
  const rules: WrittenRule[] = [...written.rules];
  for (const [targets, isOpen] of [
    [allow, true],
    [deny, false],
  ] as const) {
    for (const target of targets) {
      refuseBareService(target, isOpen ? '--allow' : '--deny', program);
      if (target.startsWith('@')) services[target.slice(1)] = isOpen;
      else rules.push(ruleOf(target, isOpen, program));
    }
  }
  // Once more: what was typed is no better than what a file has.
  return parsePolicy({ default: preset ?? written.default, rules, services });
}

/** What libraries call `pypi` is `@pypi` here, and a host of that name is hardly ever meant. @throws CLI_USAGE */
function refuseBareService(target: string, option: string, program: string): void {
  const [name = ''] = target.split(':');
  if (name.includes('.') || !Object.hasOwn(BUILT_IN_SERVICES, name)) return;
  const problem = `${option} ${target}: a host of that name; the service is @${name}. A rule of --policy FILE can name such a host`;
  throw fail('CLI_USAGE', { problem, program });
}

/** `TARGET[:PORTS[/PROTOCOL]]`; an IPv6 address with ports is in brackets. */
function ruleOf(text: string, isOpen: boolean, program: string): WrittenRule {
  const isBareIPv6 = !text.startsWith('[') && text.split(':').length > 2;
  const found = isBareIPv6 ? [text, text] : /^(?:\[([^\]]+)\]|([^:[\]]+))(?::([^:/]+)(?:\/([a-z]+))?)?$/.exec(text);
  if (found === null) {
    const problem = `${text}: write TARGET, TARGET:PORTS or TARGET:PORTS/PROTOCOL, as 10.0.0.0/8:443,8000-8100/tcp or [2001:db8::/32]:53/udp`;
    throw fail('CLI_USAGE', { problem, program });
  }
  const [, bracketed, plain, ports, protocol] = found;
  const target = bracketed ?? plain!;
  return {
    ...(isOpen ? { allow: target } : { deny: target }),
    ...(ports === undefined || ports === '*' ? {} : { ports: ports.split(',') }),
    ...(protocol === undefined ? {} : { protocol: protocol as WrittenRule['protocol'] }),
  };
}

function readJson(path: string): unknown {
  let text: string;
  try {
    text = readFileSync(path, 'utf8');
  } catch (error) {
    throw fail('CLI_INPUT_UNREADABLE', { path, reason: messageOf(error) }, error);
  }
  try {
    return JSON.parse(text);
  } catch (error) {
    throw fail('CLI_NETWORK_POLICY', { path, problem: messageOf(error) }, error);
  }
}
