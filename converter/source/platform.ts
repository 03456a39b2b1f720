/** Platforms in OCI's words (GOOS, GOARCH, variant): parsing, this machine's, and which of several fits a wish. */
import { fail } from '../errors.ts';
import type { Platform } from './image-source.ts';
import { quote } from './quote.ts';

const ALIASES: Record<string, string> = {
  x86_64: 'amd64',
  'x86-64': 'amd64',
  x64: 'amd64',
  aarch64: 'arm64',
  i386: '386',
  i686: '386',
  ia32: '386',
};
const NODE_ARCH: Record<string, string> = { x64: 'amd64', ia32: '386', ppc64: 'ppc64le' };

/** @throws SOURCE_PLATFORM_NAME */
export function parsePlatform(text: string): Platform {
  const parts = text.split('/');
  if (parts.length < 2 || parts.length > 3 || !parts.every((part) => /^[A-Za-z0-9._-]{1,64}$/.test(part))) {
    throw fail('SOURCE_PLATFORM_NAME', { text: quote(text) });
  }
  const [os, arch, variant] = parts.map((part) => part.toLowerCase());
  if (arch === 'armhf') return { os: os!, architecture: 'arm', variant: variant ?? 'v7' };
  const architecture = ALIASES[arch!] ?? arch!;
  return variant === undefined ? { os: os!, architecture } : { os: os!, architecture, variant };
}

export function hostPlatform(arch: string = process.arch): Platform {
  return { os: 'linux', architecture: NODE_ARCH[arch] ?? arch };
}

export function formatPlatform(platform: Platform): string {
  const variant = platform.variant === undefined || platform.variant === '' ? '' : `/${platform.variant}`;
  return `${platform.os}/${platform.architecture}${variant}`;
}

/**
 * How well `offered` serves `wanted`: 0 not at all, higher is better. arm and amd64 variants run on all later ones, so a
 * wish for arm/v7 is served by v7, else v6, else v5; arm64 without a variant is v8, arm without one is v7.
 */
export function platformScore(wanted: Platform, offered: Platform): number {
  if (wanted.os !== offered.os || wanted.architecture !== offered.architecture) return 0;
  const want = level(wanted);
  const have = level(offered);
  if (want === undefined || have === undefined) return wanted.variant === offered.variant ? 1000 : 0;
  return have > want ? 0 : 1000 - (want - have);
}

/** Variants as numbers: `v7` is 70, `v8.2` is 82. Undefined when it is none of this form. */
function level(platform: Platform): number | undefined {
  if (platform.variant === undefined || platform.variant === '') {
    return platform.architecture === 'arm' ? 70 : platform.architecture === 'arm64' ? 80 : 10;
  }
  const match = /^v?(\d)(?:\.(\d))?$/.exec(platform.variant);
  return match === null ? undefined : Number(match[1]) * 10 + Number(match[2] ?? 0);
}
