/* The tools of the musl image (resident-images.ts), compiled by musl-gcc and linked with musl's shared library: what each is follows from its name. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

extern char **environ;

/* What has come is passed on at once: a terminal waits for an answer. */
static int copy(int from) {
  char part[65536];
  ssize_t n;
  while ((n = read(from, part, sizeof part)) > 0)
    for (ssize_t done = 0; done < n;) {
      ssize_t written = write(1, part + done, n - done);
      if (written < 0) return 1;
      done += written;
    }
  return n < 0;
}

static int cat(int argc, char **argv) {
  int status = 0;
  if (argc == 1) status = copy(0);
  for (int i = 1; i < argc; i++) {
    int file = open(argv[i], O_RDONLY);
    if (file < 0) {
      perror(argv[i]);
      status = 1;
      continue;
    }
    status |= copy(file);
    close(file);
  }
  return status;
}

static int id(const char *what) {
  if (strcmp(what, "-u") == 0) return printf("%d\n", geteuid()) < 0;
  if (strcmp(what, "-g") == 0) return printf("%d\n", getegid()) < 0;
  gid_t groups[256];
  int count = getgroups(256, groups);
  printf("%d", getegid());
  for (int i = 0; i < count; i++)
    if (groups[i] != getegid()) printf(" %d", groups[i]);
  return printf("\n") < 0;
}

/* Of formats only such as have one %s. */
static int print(int argc, char **argv) {
  char *at = strstr(argv[1], "%s");
  for (int i = 2; i < argc; i++) printf("%.*s%s%s", (int)(at - argv[1]), argv[1], argv[i], at + 2);
  return 0;
}

int main(int argc, char **argv) {
  const char *slash = strrchr(argv[0], '/');
  const char *name = slash == NULL ? argv[0] : slash + 1;
  if (strcmp(name, "true") == 0) return 0;
  if (strcmp(name, "false") == 0) return 1;
  if (strcmp(name, "cat") == 0) return cat(argc, argv);
  if (strcmp(name, "id") == 0) return id(argc > 1 ? argv[1] : "-u");
  if (strcmp(name, "printf") == 0) return print(argc, argv);
  if (strcmp(name, "sleep") == 0) return sleep(atoi(argv[1])) != 0;
  if (strcmp(name, "pwd") == 0) {
    char path[4096];
    return getcwd(path, sizeof path) == NULL || puts(path) < 0;
  }
  if (strcmp(name, "env") == 0) {
    for (char **entry = environ; *entry != NULL; entry++) puts(*entry);
    return 0;
  }
  if (strcmp(name, "tty") == 0) {
    const char *path = ttyname(0);
    puts(path == NULL ? "not a tty" : path);
    return path == NULL;
  }
  fprintf(stderr, "%s: no such tool\n", name);
  return 127;
}
