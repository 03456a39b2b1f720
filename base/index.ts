export * from './bytes.ts';
export * from './digest.ts';
export * from './error.ts';
export * from './progress.ts';
