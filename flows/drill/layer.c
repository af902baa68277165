/* A layer between programs and the kernel that fails as disks, clocks and networks do; loaded with LD_PRELOAD.

   Its orders are in a shared file (STEMMA_DRILL_LAYER), which the drill writes and all processes map. It touches files
   below one folder only. While it records, it notes everything that is not on the disk yet, so that a power loss can be
   played: flows/drill/power.py reads the notes and takes back what no fsync made durable. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

struct orders {
    volatile int32_t error;     /* errno of every change below the folder; 0: none */
    volatile int32_t reads;     /* reads fail with it too */
    volatile int32_t records;   /* notes for a power loss */
    volatile int32_t cut;       /* no connection over IP */
    volatile int64_t clock_s;   /* added to the clock on the wall */
    char folder[1024];
    char notes[1024];
    char graves[1024];
};

static struct orders *orders;
static size_t folder_length;

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("STEMMA_DRILL_LAYER");
    if (!path) return;
    int fd = syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return;
    void *map = mmap(NULL, sizeof(struct orders), PROT_READ, MAP_SHARED, fd, 0);
    syscall(SYS_close, fd);
    if (map == MAP_FAILED) return;
    folder_length = strlen(((struct orders *)map)->folder);
    orders = map;
}

#define REAL(name) ({ static typeof(&name) real; if (!real) real = (typeof(&name))dlsym(RTLD_NEXT, #name); real; })
#define FAILS (orders && orders->error)
#define RECORDS (orders && orders->records)

static int below(const char *path) {
    return !strncmp(path, orders->folder, folder_length) && (path[folder_length] == '/' || !path[folder_length]);
}

static int file_path(int fd, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = syscall(SYS_readlinkat, AT_FDCWD, link, path, PATH_MAX - 1);
    if (length <= 0 || path[0] != '/') return 0;
    path[length] = 0;
    return below(path);
}

static int absolute(int at, const char *name, char *path) {
    if (!name) return 0;
    if (name[0] == '/') {
        snprintf(path, PATH_MAX, "%s", name);
    } else {
        char link[64];
        if (at == AT_FDCWD) snprintf(link, sizeof link, "/proc/self/cwd");
        else snprintf(link, sizeof link, "/proc/self/fd/%d", at);
        ssize_t length = syscall(SYS_readlinkat, AT_FDCWD, link, path, PATH_MAX - 1);
        if (length <= 0) return 0;
        snprintf(path + length, PATH_MAX - length, "/%s", name);
    }
    return below(path);
}

/* Notes: a header, two paths, the bytes that were there. */
struct note {
    uint32_t size, kind;
    uint64_t inode;
    int64_t offset, before;
    uint32_t first, second, data;
    uint32_t unused;
};

static void note(char kind, uint64_t inode, int64_t offset, int64_t before, const char *first, const char *second,
                 const void *data, size_t length) {
    struct note head = {.kind = kind, .inode = inode, .offset = offset, .before = before,
                        .first = first ? strlen(first) : 0, .second = second ? strlen(second) : 0, .data = length};
    head.size = sizeof head + head.first + head.second + head.data;
    struct iovec parts[4] = {{&head, sizeof head}, {(void *)first, head.first}, {(void *)second, head.second},
                             {(void *)data, length}};
    int kept = errno;
    int fd = syscall(SYS_openat, AT_FDCWD, orders->notes, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    if (fd >= 0) {
        syscall(SYS_writev, fd, parts, 4);
        syscall(SYS_close, fd);
    }
    errno = kept;
}

/* The bytes that a change of [offset, offset + length) takes; offset < 0: at the position of the file. */
static void note_data(int fd, int64_t offset, size_t length) {
    char path[PATH_MAX];
    struct stat info;
    if (!file_path(fd, path) || fstat(fd, &info) || !S_ISREG(info.st_mode)) return;
    int flags = fcntl(fd, F_GETFL);
    if (offset < 0) offset = (flags & O_APPEND) ? info.st_size : syscall(SYS_lseek, fd, 0, SEEK_CUR);
    size_t there = offset < info.st_size ? (size_t)(info.st_size - offset) : 0;
    if (there > length) there = length;
    char *old = there ? malloc(there) : NULL;
    if (old) {
        int reader = syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC);
        ssize_t read = reader < 0 ? 0 : syscall(SYS_pread64, reader, old, there, offset);
        if (reader >= 0) syscall(SYS_close, reader);
        there = read > 0 ? read : 0;
    }
    note('W', info.st_ino, offset, info.st_size, path, NULL, old, old ? there : 0);
    free(old);
}

/* A second name for a file that loses its own, so that it can come back. */
static int bury(const char *path, char *grave) {
    struct stat info;
    if (lstat(path, &info)) return 0;
    snprintf(grave, PATH_MAX, "%s/%llu-%d-%lx", orders->graves, (unsigned long long)info.st_ino, getpid(),
             (unsigned long)clock());
    if (S_ISDIR(info.st_mode)) { grave[0] = 0; return 1; }
    if (syscall(SYS_linkat, AT_FDCWD, path, AT_FDCWD, grave, 0)) grave[0] = 0;
    return 1;
}

static int fails_fd(int fd) {
    char path[PATH_MAX];
    if (FAILS && file_path(fd, path)) { errno = orders->error; return 1; }
    return 0;
}

static int fails_path(int at, const char *name) {
    char path[PATH_MAX];
    if (FAILS && absolute(at, name, path)) { errno = orders->error; return 1; }
    return 0;
}

/* Data. A full disk still lets a file shrink, be removed, or have another name. */
#define ROOM_ENOUGH (orders && orders->error == ENOSPC)
#define SHRINK(fd, size) do { if (!ROOM_ENOUGH && fails_fd(fd)) return -1; if (RECORDS) note_data(fd, size, SIZE_MAX); } while (0)
#define CHANGE(fd, offset, length) do { if (fails_fd(fd)) return -1; if (RECORDS) note_data(fd, offset, length); } while (0)

ssize_t write(int fd, const void *data, size_t size) { CHANGE(fd, -1, size); return REAL(write)(fd, data, size); }
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) { CHANGE(fd, at, size); return REAL(pwrite)(fd, data, size, at); }
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) { CHANGE(fd, at, size); return REAL(pwrite64)(fd, data, size, at); }

static size_t total(const struct iovec *parts, int count) {
    size_t size = 0;
    for (int index = 0; index < count; index++) size += parts[index].iov_len;
    return size;
}
ssize_t writev(int fd, const struct iovec *parts, int count) { CHANGE(fd, -1, total(parts, count)); return REAL(writev)(fd, parts, count); }
ssize_t sendfile(int out, int in, off_t *at, size_t size) { CHANGE(out, -1, size); return REAL(sendfile)(out, in, at, size); }
ssize_t sendfile64(int out, int in, off64_t *at, size_t size) { CHANGE(out, -1, size); return REAL(sendfile64)(out, in, at, size); }
ssize_t copy_file_range(int in, off64_t *from, int out, off64_t *to, size_t size, unsigned flags) {
    CHANGE(out, to ? *to : -1, size);
    return REAL(copy_file_range)(in, from, out, to, size, flags);
}
int ftruncate(int fd, off_t size) { SHRINK(fd, size); return REAL(ftruncate)(fd, size); }
int ftruncate64(int fd, off64_t size) { SHRINK(fd, size); return REAL(ftruncate64)(fd, size); }
int posix_fallocate(int fd, off_t at, off_t size) { if (fails_fd(fd)) return errno; return REAL(posix_fallocate)(fd, at, size); }
int posix_fallocate64(int fd, off64_t at, off64_t size) { if (fails_fd(fd)) return errno; return REAL(posix_fallocate64)(fd, at, size); }

static void note_sync(int fd) {
    char path[PATH_MAX];
    struct stat info;
    if (RECORDS && file_path(fd, path) && !fstat(fd, &info)) note('S', info.st_ino, 0, 0, path, NULL, NULL, 0);
}
int fsync(int fd) { if (fails_fd(fd)) return -1; int code = REAL(fsync)(fd); if (!code) note_sync(fd); return code; }
int fdatasync(int fd) { if (fails_fd(fd)) return -1; int code = REAL(fdatasync)(fd); if (!code) note_sync(fd); return code; }

#define READS(fd) do { if (orders && orders->reads && fails_fd(fd)) return -1; } while (0)
ssize_t read(int fd, void *data, size_t size) { READS(fd); return REAL(read)(fd, data, size); }
ssize_t pread(int fd, void *data, size_t size, off_t at) { READS(fd); return REAL(pread)(fd, data, size, at); }
ssize_t pread64(int fd, void *data, size_t size, off64_t at) { READS(fd); return REAL(pread64)(fd, data, size, at); }

/* Names */
static int open_as(int at, const char *name, int flags, mode_t mode) {
    char path[PATH_MAX];
    int changes = (flags & O_ACCMODE) != O_RDONLY || (flags & O_CREAT), is_new = 0;
    if (changes && fails_path(at, name)) return -1;
    if (changes && RECORDS && absolute(at, name, path)) {
        struct stat info;
        is_new = lstat(path, &info) != 0;
        if (!is_new && (flags & O_TRUNC) && S_ISREG(info.st_mode) && info.st_size) {
            int fd = syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC);
            if (fd >= 0) { note_data(fd, 0, SIZE_MAX); syscall(SYS_close, fd); }
        }
    }
    int fd = syscall(SYS_openat, at, name, flags, mode);
    struct stat info;
    if (fd >= 0 && is_new && !fstat(fd, &info)) note('C', info.st_ino, 0, 0, path, NULL, NULL, 0);
    return fd;
}
#define MODE mode_t mode = 0; if (flags & (O_CREAT | O_TMPFILE)) { va_list list; va_start(list, flags); mode = va_arg(list, mode_t); va_end(list); }
int open(const char *name, int flags, ...) { MODE return open_as(AT_FDCWD, name, flags, mode); }
int open64(const char *name, int flags, ...) { MODE return open_as(AT_FDCWD, name, flags, mode); }
int openat(int at, const char *name, int flags, ...) { MODE return open_as(at, name, flags, mode); }
int openat64(int at, const char *name, int flags, ...) { MODE return open_as(at, name, flags, mode); }
int creat(const char *name, mode_t mode) { return open_as(AT_FDCWD, name, O_CREAT | O_WRONLY | O_TRUNC, mode); }

int renameat2(int from_at, const char *from, int to_at, const char *to, unsigned flags) {
    char first[PATH_MAX], second[PATH_MAX], grave[PATH_MAX];
    if (!ROOM_ENOUGH && (fails_path(from_at, from) || fails_path(to_at, to))) return -1;
    int noted = RECORDS && absolute(from_at, from, first) && absolute(to_at, to, second);
    int replaced = noted && bury(second, grave);
    long code = syscall(SYS_renameat2, from_at, from, to_at, to, flags);
    if (!code && noted) note('R', 0, replaced, 0, first, second, replaced ? grave : NULL, replaced ? strlen(grave) : 0);
    return code;
}
int renameat(int from_at, const char *from, int to_at, const char *to) { return renameat2(from_at, from, to_at, to, 0); }
int rename(const char *from, const char *to) { return renameat2(AT_FDCWD, from, AT_FDCWD, to, 0); }

int unlinkat(int at, const char *name, int flags) {
    char path[PATH_MAX], grave[PATH_MAX];
    if (!ROOM_ENOUGH && fails_path(at, name)) return -1;
    int noted = RECORDS && absolute(at, name, path) && bury(path, grave);
    long code = syscall(SYS_unlinkat, at, name, flags);
    if (!code && noted) note(flags & AT_REMOVEDIR ? 'D' : 'U', 0, 0, 0, path, grave, NULL, 0);
    return code;
}
int unlink(const char *name) { return unlinkat(AT_FDCWD, name, 0); }
int rmdir(const char *name) { return unlinkat(AT_FDCWD, name, AT_REMOVEDIR); }
int remove(const char *name) { struct stat info; return lstat(name, &info) ? -1 : unlinkat(AT_FDCWD, name, S_ISDIR(info.st_mode) ? AT_REMOVEDIR : 0); }

int mkdirat(int at, const char *name, mode_t mode) {
    char path[PATH_MAX];
    if (fails_path(at, name)) return -1;
    long code = syscall(SYS_mkdirat, at, name, mode);
    if (!code && RECORDS && absolute(at, name, path)) note('M', 0, 0, 0, path, NULL, NULL, 0);
    return code;
}
int mkdir(const char *name, mode_t mode) { return mkdirat(AT_FDCWD, name, mode); }

int linkat(int from_at, const char *from, int to_at, const char *to, int flags) {
    char path[PATH_MAX];
    if (fails_path(to_at, to)) return -1;
    long code = syscall(SYS_linkat, from_at, from, to_at, to, flags);
    if (!code && RECORDS && absolute(to_at, to, path)) note('C', 0, 0, 0, path, NULL, NULL, 0);
    return code;
}
int link(const char *from, const char *to) { return linkat(AT_FDCWD, from, AT_FDCWD, to, 0); }

/* A full disk has no room, whoever asks. */
static int is_full(const char *name, int fd) {
    char path[PATH_MAX];
    return FAILS && orders->error == ENOSPC && (name ? absolute(AT_FDCWD, name, path) : file_path(fd, path));
}
int statvfs(const char *name, struct statvfs *room) {
    int code = REAL(statvfs)(name, room);
    if (!code && is_full(name, -1)) room->f_bfree = room->f_bavail = 0;
    return code;
}
int statvfs64(const char *name, struct statvfs64 *room) {
    int code = REAL(statvfs64)(name, room);
    if (!code && is_full(name, -1)) room->f_bfree = room->f_bavail = 0;
    return code;
}
int fstatvfs(int fd, struct statvfs *room) {
    int code = REAL(fstatvfs)(fd, room);
    if (!code && is_full(NULL, fd)) room->f_bfree = room->f_bavail = 0;
    return code;
}

/* Clocks and networks */
int clock_gettime(clockid_t clock, struct timespec *now) {
    int code = REAL(clock_gettime)(clock, now);
    if (!code && orders && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += orders->clock_s;
    return code;
}
int gettimeofday(struct timeval *now, void *zone) {
    int code = REAL(gettimeofday)(now, zone);
    if (!code && orders && now) now->tv_sec += orders->clock_s;
    return code;
}
time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}

static int is_cut(int fd) {
    struct sockaddr_storage name;
    socklen_t size = sizeof name;
    if (!orders || !orders->cut || getsockname(fd, (struct sockaddr *)&name, &size)) return 0;
    return name.ss_family == AF_INET || name.ss_family == AF_INET6;
}
int connect(int fd, const struct sockaddr *name, socklen_t size) {
    if (is_cut(fd)) { errno = ENETUNREACH; return -1; }
    return REAL(connect)(fd, name, size);
}
ssize_t send(int fd, const void *data, size_t size, int flags) {
    if (is_cut(fd)) { errno = ECONNRESET; return -1; }
    return REAL(send)(fd, data, size, flags);
}
ssize_t sendmsg(int fd, const struct msghdr *message, int flags) {
    if (is_cut(fd)) { errno = ECONNRESET; return -1; }
    return REAL(sendmsg)(fd, message, flags);
}
