/**
 * What a build leaves behind that nobody wants in a layer: caches that refill by themselves, histories, scratch folders,
 * runtime state. docs/pack-diff.md lists the same patterns and says why each is there; a test holds the two together.
 *
 * Only additions are dropped. A directory the pattern names inside (`/tmp/**`) stays itself, with its mode.
 */
export const RESIDUE_PATTERNS: readonly string[] = [
  // Scratch and runtime state: gone after a restart anyway.
  '/tmp/**',
  '/var/tmp/**',
  '/run/**',
  '/var/run/**',
  '/dev/**',
  '/proc/**',
  '/sys/**',
  // Package managers of distributions.
  '/var/cache/apt/**',
  '/var/lib/apt/lists/**',
  '/var/cache/debconf/*-old',
  '/var/lib/dpkg/*-old',
  '/var/cache/dnf/**',
  '/var/cache/yum/**',
  '/var/cache/apk/**',
  '/var/cache/pacman/pkg/**',
  '/var/cache/ldconfig/aux-cache',
  // Package managers of languages, in any home.
  '**/.cache/pip/**',
  '**/.cache/uv/**',
  '**/.cache/pypoetry/cache/**',
  '**/.cache/pypoetry/artifacts/**',
  '**/.cache/yarn/**',
  '**/.cache/go-build/**',
  '**/.cache/node-gyp/**',
  '**/.npm/_cacache/**',
  '**/.npm/_logs/**',
  '**/.yarn/berry/cache/**',
  '**/.cargo/registry/cache/**',
  '**/.cargo/registry/index/**',
  '/usr/local/cargo/registry/cache/**',
  '/usr/local/cargo/registry/index/**',
  // Histories of interactive programs.
  '.ash_history',
  '.bash_history',
  '.zsh_history',
  '.sh_history',
  '.python_history',
  '.node_repl_history',
  '.sqlite_history',
  '.psql_history',
  '.mysql_history',
  '.lesshst',
  '.viminfo',
  '.wget-hsts',
  // Core dumps as the kernel names them by default.
  'core.[0-9]*',
];
