// SPDX-License-Identifier: Apache-2.0
// Counts, logs and breaks the I/O of one process below one directory.
//
// Preloaded into a training process. faults_arm() says below which directory, where to log, and
// at which call to do what; until then every call passes through. Calls that change or sync
// something are numbered from 1 in the order in which they are entered:
//   open (that creates or truncates), write, fsync, rename, mkdir, unlink, link, truncate.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum action { LOG_ONLY = 0, KILL = 1, FAIL_ONCE = 2, FAIL_FROM = 3 };

static char root[PATH_MAX];
static size_t root_length;
static int log_fd = -1;
static int action;
static long target;
static int error_number;
static atomic_long calls;
static char match[64];
static atomic_long matches;
static atomic_int armed;

// Starts counting at 1. With a text `only`, calls whose line in the log contains it are the ones
// that `at` counts; "" counts all. KILL ends the process at call `at` (half of a write is done first);
// FAIL_ONCE fails that call with `error`; FAIL_FROM fails it and all later ones that need space.
void faults_arm(const char *directory, const char *log, int what, long at, int error,
                const char *only) {
  atomic_store(&armed, 0);
  snprintf(root, sizeof root, "%s", directory);
  root_length = strlen(root);
  if (log_fd >= 0) close(log_fd);
  log_fd = (int)syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  action = what;
  target = at;
  error_number = error;
  snprintf(match, sizeof match, "%s", only);
  atomic_store(&matches, 0);
  atomic_store(&calls, 0);
  atomic_store(&armed, 1);
}

void faults_disarm(void) { atomic_store(&armed, 0); }

long faults_calls(void) { return atomic_load(&calls); }

static void *real(const char *name) { return dlsym(RTLD_NEXT, name); }
#define REAL(name) \
  static __typeof__(&name) next; \
  if (!next) next = (__typeof__(&name))real(#name)

static int below_root(const char *path) {
  return strncmp(path, root, root_length) == 0 &&
         (path[root_length] == '/' || path[root_length] == '\0');
}

static int path_of_fd(int fd, char *out) {
  char link[64];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t length = syscall(SYS_readlinkat, AT_FDCWD, link, out, PATH_MAX - 1);
  if (length < 0) return 0;
  out[length] = '\0';
  return 1;
}

static int path_at(int dir, const char *path, char *out) {
  if (path[0] == '/') {
    snprintf(out, PATH_MAX, "%s", path);
    return 1;
  }
  char base[PATH_MAX];
  if (dir == AT_FDCWD) {
    if (syscall(SYS_getcwd, base, sizeof base) < 0) return 0;
  } else if (!path_of_fd(dir, base)) {
    return 0;
  }
  size_t length = strlen(base);
  if (length + 1 + strlen(path) >= PATH_MAX) return 0;
  memcpy(out, base, length);
  out[length] = '/';
  strcpy(out + length + 1, path);
  return 1;
}

static int needs_space(const char *call) {
  return !strcmp(call, "write") || !strcmp(call, "open") || !strcmp(call, "mkdir") ||
         !strcmp(call, "fsync");
}

// Returns what the caller does: 0 go on, 1 do half of it and die, else fail with that errno.
enum { GO_ON = 0, DIE = -1 };
static int enter(const char *call, const char *path) {
  if (!below_root(path)) return GO_ON;
  long number = atomic_fetch_add(&calls, 1) + 1;
  char line[PATH_MAX + 64];
  int length = snprintf(line, sizeof line, "%ld %s %s\n", number, call, path + root_length);
  if (log_fd >= 0) syscall(SYS_write, log_fd, line, length);
  if (match[0]) {
    if (!strstr(line, match)) return GO_ON;
    number = atomic_fetch_add(&matches, 1) + 1;
  }
  if (action == KILL && number == target) return DIE;
  if (action == FAIL_ONCE && number == target) return error_number;
  if (action == FAIL_FROM && number >= target && needs_space(call)) return error_number;
  return GO_ON;
}

static void die(void) {
  syscall(SYS_kill, syscall(SYS_getpid), SIGKILL);
  for (;;) pause();
}

#define ENTER_AT(call, dir, path)                          \
  if (atomic_load_explicit(&armed, memory_order_acquire)) { \
    char full[PATH_MAX];                                   \
    if (path_at(dir, path, full)) {                        \
      int verdict = enter(call, full);                     \
      if (verdict == DIE) die();                           \
      if (verdict) {                                       \
        errno = verdict;                                   \
        return -1;                                         \
      }                                                    \
    }                                                      \
  }

#define ENTER_FD(call, fd, half)                           \
  if (atomic_load_explicit(&armed, memory_order_acquire)) { \
    char full[PATH_MAX];                                   \
    if (path_of_fd(fd, full)) {                            \
      int verdict = enter(call, full);                     \
      if (verdict == DIE) {                                \
        half;                                              \
        die();                                             \
      }                                                    \
      if (verdict) {                                       \
        errno = verdict;                                   \
        return -1;                                         \
      }                                                    \
    }                                                      \
  }

#define OPEN_BODY(dir)                                     \
  mode_t mode = 0;                                         \
  if ((flags & O_CREAT) || (flags & O_TMPFILE) == O_TMPFILE) { \
    va_list arguments;                                     \
    va_start(arguments, flags);                            \
    mode = va_arg(arguments, mode_t);                      \
    va_end(arguments);                                     \
  }                                                        \
  if (flags & (O_CREAT | O_TRUNC)) ENTER_AT("open", dir, path)

int open(const char *path, int flags, ...) {
  REAL(open);
  OPEN_BODY(AT_FDCWD)
  return next(path, flags, mode);
}
int open64(const char *path, int flags, ...) {
  REAL(open64);
  OPEN_BODY(AT_FDCWD)
  return next(path, flags, mode);
}
int openat(int dir, const char *path, int flags, ...) {
  REAL(openat);
  OPEN_BODY(dir)
  return next(dir, path, flags, mode);
}
int openat64(int dir, const char *path, int flags, ...) {
  REAL(openat64);
  OPEN_BODY(dir)
  return next(dir, path, flags, mode);
}

ssize_t write(int fd, const void *data, size_t size) {
  REAL(write);
  ENTER_FD("write", fd, next(fd, data, size / 2))
  return next(fd, data, size);
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t offset) {
  REAL(pwrite);
  ENTER_FD("write", fd, next(fd, data, size / 2, offset))
  return next(fd, data, size, offset);
}
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t offset) {
  REAL(pwrite64);
  ENTER_FD("write", fd, next(fd, data, size / 2, offset))
  return next(fd, data, size, offset);
}
ssize_t writev(int fd, const struct iovec *pieces, int count) {
  REAL(writev);
  ENTER_FD("write", fd, next(fd, pieces, count / 2))
  return next(fd, pieces, count);
}
ssize_t pwritev(int fd, const struct iovec *pieces, int count, off_t offset) {
  REAL(pwritev);
  ENTER_FD("write", fd, next(fd, pieces, count / 2, offset))
  return next(fd, pieces, count, offset);
}
ssize_t pwritev64(int fd, const struct iovec *pieces, int count, off64_t offset) {
  REAL(pwritev64);
  ENTER_FD("write", fd, next(fd, pieces, count / 2, offset))
  return next(fd, pieces, count, offset);
}
int ftruncate(int fd, off_t size) {
  REAL(ftruncate);
  ENTER_FD("truncate", fd, (void)0)
  return next(fd, size);
}
int ftruncate64(int fd, off64_t size) {
  REAL(ftruncate64);
  ENTER_FD("truncate", fd, (void)0)
  return next(fd, size);
}
int fsync(int fd) {
  REAL(fsync);
  ENTER_FD("fsync", fd, (void)0)
  return next(fd);
}
int fdatasync(int fd) {
  REAL(fdatasync);
  ENTER_FD("fsync", fd, (void)0)
  return next(fd);
}

int rename(const char *from, const char *to) {
  REAL(rename);
  ENTER_AT("rename", AT_FDCWD, to)
  return next(from, to);
}
int renameat(int from_dir, const char *from, int to_dir, const char *to) {
  REAL(renameat);
  ENTER_AT("rename", to_dir, to)
  return next(from_dir, from, to_dir, to);
}
int renameat2(int from_dir, const char *from, int to_dir, const char *to, unsigned flags) {
  REAL(renameat2);
  ENTER_AT("rename", to_dir, to)
  return next(from_dir, from, to_dir, to, flags);
}
int link(const char *from, const char *to) {
  REAL(link);
  ENTER_AT("link", AT_FDCWD, to)
  return next(from, to);
}
int linkat(int from_dir, const char *from, int to_dir, const char *to, int flags) {
  REAL(linkat);
  ENTER_AT("link", to_dir, to)
  return next(from_dir, from, to_dir, to, flags);
}
int mkdir(const char *path, mode_t mode) {
  REAL(mkdir);
  ENTER_AT("mkdir", AT_FDCWD, path)
  return next(path, mode);
}
int mkdirat(int dir, const char *path, mode_t mode) {
  REAL(mkdirat);
  ENTER_AT("mkdir", dir, path)
  return next(dir, path, mode);
}
int unlink(const char *path) {
  REAL(unlink);
  ENTER_AT("unlink", AT_FDCWD, path)
  return next(path);
}
int unlinkat(int dir, const char *path, int flags) {
  REAL(unlinkat);
  ENTER_AT("unlink", dir, path)
  return next(dir, path, flags);
}
int rmdir(const char *path) {
  REAL(rmdir);
  ENTER_AT("unlink", AT_FDCWD, path)
  return next(path);
}
