/** Every error the converter makes. Kept alphabetical; docs/errors.md lists the same rows. */
import { errorTable } from '#base';

export const converterErrors = {} as const;

export const fail = errorTable(converterErrors);
