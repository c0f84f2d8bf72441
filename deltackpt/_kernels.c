/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Compiled kernels: the codecs of rows and blocks, copies of rows, the scan of stamps, checksums.
 *
 * The file includes itself once per instruction set (see "The kernels", below), and one table of
 * functions is chosen when the module is loaded. Every table computes the same bits: sums have one
 * order, independent of the vector length, and the compiler must not contract a product and a sum
 * (-ffp-contract=off). `deltackpt/kernels.py` calls this module; if it was not built, numpy and XLA
 * compute the same bits.
 *
 * The module's functions check all arguments, and release the GIL while a kernel runs.
 */
#ifndef TARGET

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

/* Rows to encode, (count, width), and the arrays that receive codes and sums of squares. */
struct encoding {
    const void *rows;
    enum dtype { FLOAT32, BFLOAT16, FLOAT16 } dtype;
    size_t count, width;
    uint8_t *held;                         /* (count,): 0 if the codec cannot represent the row. */
    float *squared_error, *squared_norm;   /* (count,) */
    void *codes;                           /* (count, bytes of a row), or (count, width) uint16. */
    uint16_t *scale, *offset;              /* (count,); offset is NULL if codes are symmetric. */
    float *scratch;                        /* scratch_floats(width) floats. */
};

/* Uniform codes to decode, and the array that receives the rows. */
struct decoding {
    const uint8_t *codes;           /* (count, bytes of a row) */
    const uint16_t *scale, *offset; /* (count,); offset is NULL if codes are symmetric. */
    size_t count, width;
    int bits;
    float *out;       /* (count, width) */
    uint8_t *scratch; /* width + 2 * CHUNK bytes. */
};

/* See `deltackpt/codecs/uniform.py`; `shrink` is 1 / bins, or 0 without a search. */
struct uniform {
    int bits, symmetric, steps, refits;
    float shrink, smallest, largest;
};

/* ---- Blocks of dense leaves ---- */

/* Elements of a block. */
enum { BLOCK = 256 };
/* Types of elements: those of `enum dtype`, in the order of `codecs.block_codec.FLOATS`. */
enum { TYPES = FLOAT16 + 1 };
/* Codecs: symmetric codes of values or of changes, and grids of logarithms. */
enum { ALONE8, CHANGE4, CHANGE8, LOG8, LOG4, CODECS };
/* The state of a block: see `CODED` in `deltackpt/kernels.py`. */
enum { UNCHANGED, CODED, LEFT };

/* See `codecs.uniform` and `codecs.logarithms`. */
enum { FLAG_BFLOAT16 = 0x8000, POINTS_PER_OCTAVE = 128, LOWEST_POWER = -149, CODES = 254 };
enum { FURTHEST = 7, MIDDLE = 8, WIDEST_STEP = 32, FACTORS = (WIDEST_STEP + 1) * 16 };
enum { NAMED_POINTS = 1 << 16 };

/* Patterns of float32: infinity, the smallest normal number, the square root of a half. */
enum { INFINITE = 0x7f800000, NORMAL = 0x00800000, ROOT_HALF = 0x3f3504f3 };

/* More than the error of `logarithm`: values that are points of the grid keep their points. */
#define SLACK 0x1p-10f
/* The index of the lowest nonzero byte of a word, which is not 0. */
#define FIRST_BYTE(word) ((unsigned)__builtin_ctzll(word) / 8)
/* Positions that are computed at once, and how many changes ahead memory is prefetched. */
enum { PLACES = 1024, SPARSE_AHEAD = 32 };
/* Calls for fewer bytes write through the cache; others write past it. */
#define PAST_CACHE_BYTES (4 << 20)

/* Blocks to encode; `codes`, `words` and `steps` receive those of coded blocks only. */
struct block_encoding {
    int codec, type, past_cache;
    size_t count, coded;
    const char *now, *before;
    char *out;
    uint8_t *states, *codes, *steps;
    uint16_t *words; /* Scales, or first points. */
    const void *table;
    uint32_t low, high; /* Range of the patterns that log4 can represent. */
    double squared_error, squared_norm;
};

/* Blocks to decode in place. */
struct block_decoding {
    int codec, type;
    size_t count, first;
    const int64_t *rows; /* Or NULL: from `first` on. */
    const uint8_t *codes, *steps;
    const uint16_t *words;
    const void *table;
    char *data;
};

/* Blocks to encode as changed elements; `counts`, `at` and `changes` receive those of coded blocks. */
struct sparse_encoding {
    size_t count, itemsize, most, coded, elements;
    const char *now, *before;
    uint8_t *states, *at;
    uint16_t *counts;
    char *changes;
};

/* Changes of elements to apply in place. */
struct sparse {
    size_t count, itemsize, first;
    const int64_t *rows; /* Or NULL: from `first` on. */
    const uint16_t *counts;
    const uint8_t *at;
    const char *changes;
    char *data;
};

#define ALWAYS_INLINE inline __attribute__((always_inline))

static ALWAYS_INLINE uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    return bits;
}

static ALWAYS_INLINE float float_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

/* The pattern of a magnitude; those of NaN are greater than that of infinity. */
static ALWAYS_INLINE uint32_t magnitude(float value)
{
    return bits_of(value) & 0x7fffffff;
}

static ALWAYS_INLINE float of_bfloat16(uint16_t bits)
{
    return float_of((uint32_t)bits << 16);
}

static ALWAYS_INLINE float of_float16(uint16_t bits)
{
    uint32_t sign = (uint32_t)(bits & 0x8000) << 16, rest = bits & 0x7fff;
    uint32_t subnormal = bits_of((float)(int32_t)rest * 0x1p-24f);
    uint32_t normal = (rest << 13) + (112u << 23);
    uint32_t found = rest < 0x400 ? subnormal : normal;
    return float_of(sign | (rest >= 0x7c00 ? rest << 13 | INFINITE : found));
}

/* Conversions to 16 bits round to nearest even. */
static ALWAYS_INLINE uint16_t to_bfloat16(float value)
{
    uint32_t bits = bits_of(value), nan = (bits >> 16 & 0x8000) | 0x7fc0;
    uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return (uint16_t)(magnitude(value) > INFINITE ? nan : rounded);
}

static ALWAYS_INLINE uint16_t to_float16(float value)
{
    uint32_t sign = bits_of(value) >> 16 & 0x8000, rest = magnitude(value);
    uint32_t subnormal = bits_of(float_of(rest) + 0.5f) - bits_of(0.5f);
    uint32_t normal = (rest - (112u << 23) + 0xfff + (rest >> 13 & 1)) >> 13;
    uint32_t found = rest < 0x38800000 ? subnormal : normal;
    uint32_t large = rest > INFINITE ? 0x7e00 : 0x7c00;
    return (uint16_t)(sign | (rest >= 0x47800000 ? large : found));
}

/* The kernels of one instruction set. */
struct kernels {
    const char *name;
    /* Rows. */
    void (*gather)(const char *source, size_t row_bytes, int64_t first, const int64_t *rows, size_t count,
                   int stream, char *out);
    void (*scatter)(const char *source, size_t row_bytes, const int64_t *positions, const int64_t *rows,
                    size_t count, int64_t first, int stream, char *out);
    size_t (*scan)(const int32_t *stamps, size_t count, int32_t clock, int64_t first, int64_t *out);
    void (*encode_uniform)(const struct encoding *job, const struct uniform *codec);
    void (*encode_shorter)(const struct encoding *job, enum dtype dtype, float smallest, float largest);
    void (*decode_uniform)(const struct decoding *job);
    void (*widen_halves)(const uint16_t *patterns, size_t count, float *out);
    /* Blocks. */
    void (*encode_blocks)(struct block_encoding *encoding);
    void (*decode_blocks)(const struct block_decoding *decoding);
    void (*encode_sparse)(struct sparse_encoding *encoding);
    int (*apply_sparse)(const struct sparse *sparse); /* Returns 0 if the positions do not ascend. */
};

/* Rows whose first bytes are prefetched before they are copied. */
enum { GATHER_AHEAD = 16 };
/* Shorter arrays are written through the cache: they are still in it when they are read next. */
enum { STREAM_BYTES = 8 << 20 };

/*
 * Sums over a row are 16 sums, each over every 16th column, which are then added pairwise: the same
 * bits for any vector length.
 */
enum { CHUNK = 16 };
/* How far ahead rows are prefetched: the CPU's own prefetches end at pages. */
enum { PREFETCH_BYTES = 4096 };
static const int32_t COLUMNS[CHUNK] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

/* Adding ROUND to a magnitude below 2**22 rounds it to an integer, half to even, in the lowest bits. */
#define ROUND 0x1.8p23f
enum { ROUND_BITS = 0x4B400000 };
#define SMALLEST_NORMAL 0x1p-126f
/* Limits of float16 parameters of a row: see `deltackpt/codecs/uniform.py`. */
#define FLOAT16_BELOW 0x1p15f
#define FLOAT16_SCALE 0x1p-16f

/* Room for 16 rows as float32, for their transpose, for a row of zeros, and for the codes of 16 rows. */
static size_t scratch_floats(size_t width)
{
    return 37 * width + 8 * CHUNK;
}

static size_t plane_bytes(size_t width, size_t bits)
{
    return (width * bits + 7) / 8;
}

static size_t packed_bytes(size_t width, int bits)
{
    return bits == 3 ? plane_bytes(width, 2) + plane_bytes(width, 1) : plane_bytes(width, (size_t)bits);
}

typedef float quad __attribute__((vector_size(16)));
#if defined(__x86_64__)
#define LEAST4(a, b) ((quad)_mm_min_ps((__m128)(a), (__m128)(b)))
#else
#define LEAST4(a, b) ((quad)((((a) < (b)) & (ints)(a)) | (~((a) < (b)) & (ints)(b))))
#endif

#define TARGET
#define LANES 4
#define KERNEL(name) name##_baseline
#include "_kernels.c"
#undef TARGET
#undef LANES
#undef KERNEL

#if defined(__x86_64__)

#define TARGET __attribute__((target("avx2")))
#define LANES 8
#define KERNEL(name) name##_avx2
#include "_kernels.c"
#undef TARGET
#undef LANES
#undef KERNEL

#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
#define LANES 16
#define KERNEL(name) name##_avx512
#include "_kernels.c"
#undef TARGET
#undef LANES
#undef KERNEL

#endif

/* The tables that this CPU supports, the fastest first, and the one in use. */
static const struct kernels *supported[3];
static size_t supported_count;
static const struct kernels *chosen;

static void find_supported(void)
{
    supported_count = 0;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        supported[supported_count++] = &table_avx512;
    if (__builtin_cpu_supports("avx2"))
        supported[supported_count++] = &table_avx2;
#endif
    supported[supported_count++] = &table_baseline;
    chosen = supported[0];
}

/* ---- Checksums ---- */

/* Whether this CPU computes CRC32C. */
static int has_crc32c;

#if defined(__x86_64__)

#define SSE42 __attribute__((target("sse4.2")))
/* An instruction has a latency of three cycles: three runs are computed at the same time. */
enum { RUN_BYTES = 8192, RUNS_BYTES = 3 * RUN_BYTES };
/* What each byte of a CRC32C becomes after RUN_BYTES zero bytes. */
static uint32_t over_run[4][256];

static ALWAYS_INLINE uint64_t word_at(const char *data)
{
    uint64_t word;
    memcpy(&word, data, sizeof(word));
    return word;
}

static SSE42 void find_crc32c(void)
{
    has_crc32c = __builtin_cpu_supports("sse4.2") != 0;
    for (int byte = 0; has_crc32c && byte < 4; byte++)
        for (uint32_t value = 1; value < 256; value++) {
            uint64_t crc = value << 8 * byte;
            if (value & (value - 1)) {
                over_run[byte][value] = over_run[byte][value & (value - 1)] ^ over_run[byte][value & -value];
                continue;
            }
            for (int i = 0; i < RUN_BYTES; i += 8)
                crc = _mm_crc32_u64(crc, 0);
            over_run[byte][value] = (uint32_t)crc;
        }
}

static ALWAYS_INLINE uint64_t after_run(uint64_t crc)
{
    return over_run[0][crc & 255] ^ over_run[1][crc >> 8 & 255] ^ over_run[2][crc >> 16 & 255] ^
           over_run[3][crc >> 24];
}

/* Extends the CRC32C of earlier bytes; prefetches as many bytes at `next`. */
static SSE42 uint32_t extend_crc32c(uint32_t before, const char *data, size_t nbytes, const char *next)
{
    uint64_t crc = ~before;
    for (; nbytes >= RUNS_BYTES; data += RUNS_BYTES, next += RUNS_BYTES, nbytes -= RUNS_BYTES) {
        uint64_t second = 0, third = 0;
        for (size_t line = 0; line < RUN_BYTES; line += 64) {
            _mm_prefetch(next + 3 * line, _MM_HINT_T0);
            _mm_prefetch(next + 3 * line + 64, _MM_HINT_T0);
            _mm_prefetch(next + 3 * line + 128, _MM_HINT_T0);
            for (size_t i = line; i < line + 64; i += 8) {
                crc = _mm_crc32_u64(crc, word_at(data + i));
                second = _mm_crc32_u64(second, word_at(data + RUN_BYTES + i));
                third = _mm_crc32_u64(third, word_at(data + 2 * RUN_BYTES + i));
            }
        }
        crc = after_run(after_run(crc) ^ second) ^ third;
    }
    for (; nbytes >= 8; data += 8, nbytes -= 8)
        crc = _mm_crc32_u64(crc, word_at(data));
    for (; nbytes; data++, nbytes--)
        crc = _mm_crc32_u8((uint32_t)crc, (uint8_t)*data);
    return ~(uint32_t)crc;
}

#else

enum { RUNS_BYTES = 1 };

static void find_crc32c(void)
{
}

static uint32_t extend_crc32c(uint32_t before, const char *data, size_t nbytes, const char *next)
{
    (void)data, (void)nbytes, (void)next;
    return before;
}

#endif

/*
 * Computes the CRC32C of each block; the first block begins `used` bytes earlier, and `crc` is that of
 * these bytes. If `out` is not NULL, copies the bytes there: the checksums are those of the copy.
 */
static void crc32c_blocks(const char *data, size_t nbytes, char *out, size_t block_bytes, size_t used,
                          uint32_t crc, uint32_t *sums)
{
    while (nbytes) {
        size_t left = block_bytes - used < nbytes ? block_bytes - used : nbytes;
        nbytes -= left;
        for (size_t step; left; left -= step, data += step) {
            step = left < RUNS_BYTES ? left : RUNS_BYTES;
            if (!out) {
                crc = extend_crc32c(crc, data, step, data + step);
                continue;
            }
            memcpy(out, data, step); /* It stays in the cache for the checksum. */
            crc = extend_crc32c(crc, out, step, data + step);
            out += step;
        }
        *sums++ = crc;
        crc = 0, used = 0;
    }
}

/* ---- Arguments ---- */

/* The buffers of one call. */
struct buffers {
    Py_buffer views[12];
    int written[12];
    int count;
};

static void release(struct buffers *buffers)
{
    while (buffers->count)
        PyBuffer_Release(&buffers->views[--buffers->count]);
}

/*
 * Returns the buffer of a C-contiguous, aligned array with items of the given size and, if
 * `items` is not negative, of the given length; NULL with an exception set otherwise.
 */
static void *buffer(struct buffers *buffers, PyObject *array, const char *name, Py_ssize_t itemsize,
                    Py_ssize_t items, int writable)
{
    Py_buffer *view = &buffers->views[buffers->count];
    if (PyObject_GetBuffer(array, view, writable ? PyBUF_ND | PyBUF_WRITABLE : PyBUF_ND))
        return NULL;
    buffers->written[buffers->count++] = writable;
    if (view->itemsize != itemsize) {
        PyErr_Format(PyExc_TypeError, "%s: expected items of %zd bytes, found %zd", name, itemsize,
                     view->itemsize);
        return NULL;
    }
    if (items >= 0 && view->len / itemsize != items) {
        PyErr_Format(PyExc_ValueError, "%s: expected %zd items, found %zd", name, items,
                     view->len / itemsize);
        return NULL;
    }
    /* An empty array may have no memory. */
    static int64_t nothing;
    if (view->len == 0)
        return &nothing;
    if ((uintptr_t)view->buf % (size_t)itemsize) {
        PyErr_Format(PyExc_ValueError, "%s: expected memory aligned to %zd bytes", name, itemsize);
        return NULL;
    }
    return view->buf;
}

/* The number of items of the last buffer. */
static Py_ssize_t items_of(const struct buffers *buffers)
{
    const Py_buffer *view = &buffers->views[buffers->count - 1];
    return view->len / view->itemsize;
}

static int overlap(const Py_buffer *a, const Py_buffer *b)
{
    const char *from = a->buf, *to = b->buf;
    return a->len && b->len && from < to + b->len && to < from + a->len;
}

/* Fails if a buffer that is written overlaps one that is read. */
static int check_distinct(const struct buffers *buffers)
{
    for (int i = 0; i < buffers->count; i++)
        for (int j = 0; j < buffers->count; j++)
            if (i != j && buffers->written[i] && overlap(&buffers->views[i], &buffers->views[j])) {
                PyErr_SetString(PyExc_ValueError, "expected arrays that do not overlap");
                return -1;
            }
    return 0;
}

/* The buffers of a list of arrays. */
struct list {
    Py_buffer *views;
    Py_ssize_t count;
};

static void release_list(struct list *list)
{
    while (list->count)
        PyBuffer_Release(&list->views[--list->count]);
    PyMem_Free(list->views);
}

/*
 * Gets the buffers of arrays with items of the given size. Fails with BufferError if one is not
 * C-contiguous and aligned.
 */
static int list_of(struct list *list, PyObject *arrays, const char *name, Py_ssize_t itemsize)
{
    Py_ssize_t count = PyList_Size(arrays);
    list->views = PyMem_Calloc((size_t)count + 1, sizeof *list->views);
    if (!list->views) {
        PyErr_NoMemory();
        return -1;
    }
    while (list->count < count) {
        Py_buffer *view = &list->views[list->count];
        int lacks = PyObject_GetBuffer(PyList_GetItem(arrays, list->count), view, PyBUF_ND);
        list->count += !lacks;
        if (lacks && !PyErr_ExceptionMatches(PyExc_ValueError) && !PyErr_ExceptionMatches(PyExc_BufferError))
            return -1;
        if (!lacks && view->itemsize != itemsize) {
            PyErr_Format(PyExc_TypeError, "%s: expected items of %zd bytes, found %zd", name, itemsize,
                         view->itemsize);
            return -1;
        }
        if (lacks || (view->len && (uintptr_t)view->buf % (size_t)itemsize)) {
            PyErr_Format(PyExc_BufferError, "%s: expected C-contiguous, aligned arrays", name);
            return -1;
        }
    }
    return 0;
}

/* Fails if the last buffer overlaps one of a list. */
static int check_apart(const struct buffers *buffers, const struct list *list)
{
    for (Py_ssize_t i = 0; i < list->count; i++)
        if (overlap(&buffers->views[buffers->count - 1], &list->views[i])) {
            PyErr_SetString(PyExc_ValueError, "expected arrays that do not overlap");
            return -1;
        }
    return 0;
}

/* ---- The module: instruction sets ---- */

static PyObject *py_paths(PyObject *self, PyObject *unused)
{
    (void)self, (void)unused;
    PyObject *names = PyTuple_New((Py_ssize_t)supported_count);
    for (size_t i = 0; names && i < supported_count; i++) {
        PyObject *name = PyUnicode_FromString(supported[i]->name);
        if (!name || PyTuple_SetItem(names, (Py_ssize_t)i, name))
            Py_CLEAR(names);
    }
    return names;
}

static PyObject *py_path(PyObject *self, PyObject *unused)
{
    (void)self, (void)unused;
    return PyUnicode_FromString(chosen->name);
}

static PyObject *py_use(PyObject *self, PyObject *args)
{
    (void)self;
    const char *name;
    if (!PyArg_ParseTuple(args, "s", &name))
        return NULL;
    for (size_t i = 0; i < supported_count; i++)
        if (!strcmp(supported[i]->name, name)) {
            chosen = supported[i];
            Py_RETURN_NONE;
        }
    return PyErr_Format(PyExc_ValueError, "use: expected one of paths(), found %s", name);
}

/* ---- The module: rows ---- */

/* Returns the index of the first number that is not in [first, first + length); `count` if all are. */
static Py_ssize_t first_outside(const int64_t *numbers, Py_ssize_t count, int64_t first, uint64_t length)
{
    Py_ssize_t at = 0;
    while (at < count && (uint64_t)numbers[at] - (uint64_t)first < length)
        at++;
    return at;
}

static PyObject *py_gather(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *source_arrays, *first_array, *stop_array, *row_array, *out_array, *result = NULL;
    Py_ssize_t itemsize, row_items;
    if (!PyArg_ParseTuple(args, "O!nnOOOO", &PyList_Type, &source_arrays, &itemsize, &row_items,
                          &first_array, &stop_array, &row_array, &out_array))
        return NULL;
    struct buffers buffers = {.count = 0};
    struct list sources = {.count = 0};
    if (itemsize <= 0 || row_items <= 0 || row_items > PY_SSIZE_T_MAX / itemsize) {
        PyErr_SetString(PyExc_ValueError, "gather: expected rows of at least one item that fit into memory");
        return NULL;
    }
    if (list_of(&sources, source_arrays, "source", itemsize))
        goto done;
    const int64_t *firsts = buffer(&buffers, first_array, "firsts", sizeof(int64_t), sources.count, 0);
    if (!firsts)
        goto done;
    const int64_t *stops = buffer(&buffers, stop_array, "stops", sizeof(int64_t), sources.count, 0);
    if (!stops)
        goto done;
    const int64_t *rows = buffer(&buffers, row_array, "rows", sizeof(int64_t), -1, 0);
    if (!rows)
        goto done;
    Py_ssize_t count = items_of(&buffers), last = 0;
    char *out = NULL;
    if (count <= PY_SSIZE_T_MAX / row_items)
        out = buffer(&buffers, out_array, "out", itemsize, count * row_items, 1);
    else
        PyErr_SetString(PyExc_ValueError, "gather: expected a smaller array of rows");
    if (!out || check_distinct(&buffers) || check_apart(&buffers, &sources))
        goto done;
    for (Py_ssize_t i = 0; i < sources.count && last >= 0; i++)
        last = stops[i] < last ? -1 : (Py_ssize_t)stops[i];
    if (last != count) {
        PyErr_SetString(PyExc_ValueError, "gather: expected ascending stops, the last one at all rows");
        goto done;
    }
    size_t row_bytes = (size_t)(row_items * itemsize);
    int stream = (size_t)count * row_bytes >= STREAM_BYTES && row_bytes % 64 == 0 && (uintptr_t)out % 64 == 0;
    Py_ssize_t wrong = count, of = 0;
    const struct kernels *use = chosen;
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t i = 0, at = 0; i < sources.count && wrong == count; at = (Py_ssize_t)stops[i++]) {
        uint64_t length = (uint64_t)sources.views[i].len / row_bytes;
        Py_ssize_t found = at + first_outside(rows + at, (Py_ssize_t)stops[i] - at, firsts[i], length);
        if (found < stops[i])
            wrong = found, of = i;
    }
    if (wrong == count)
        for (Py_ssize_t i = 0, at = 0; i < sources.count; at = (Py_ssize_t)stops[i++])
            use->gather(sources.views[i].buf, row_bytes, firsts[i], rows + at, (size_t)(stops[i] - at),
                        stream, out + (size_t)at * row_bytes);
    Py_END_ALLOW_THREADS
    if (wrong < count) {
        long long first = firsts[of], length = (long long)((size_t)sources.views[of].len / row_bytes);
        PyErr_Format(PyExc_IndexError, "gather: expected rows in %lld to %lld, found %lld", first,
                     first + length - 1, (long long)rows[wrong]);
        goto done;
    }
    result = Py_NewRef(Py_None);
done:
    release(&buffers);
    release_list(&sources);
    return result;
}

static PyObject *py_scatter(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *source_array, *position_array, *row_array, *out_array, *result = NULL;
    Py_ssize_t row_bytes;
    long long first;
    if (!PyArg_ParseTuple(args, "OnOOLO", &source_array, &row_bytes, &position_array, &row_array, &first,
                          &out_array))
        return NULL;
    struct buffers buffers = {.count = 0};
    const int64_t *rows = buffer(&buffers, row_array, "rows", sizeof(int64_t), -1, 0), *positions = NULL;
    if (!rows)
        goto done;
    Py_ssize_t count = items_of(&buffers), known = count, row = count;
    if (row_bytes <= 0 || count > PY_SSIZE_T_MAX / row_bytes) {
        PyErr_SetString(PyExc_ValueError, "scatter: expected rows of at least one byte that fit into memory");
        goto done;
    }
    if (position_array != Py_None &&
        !(positions = buffer(&buffers, position_array, "positions", sizeof(int64_t), count, 0)))
        goto done;
    const char *source = buffer(&buffers, source_array, "source", 1, positions ? -1 : count * row_bytes, 0);
    if (!source)
        goto done;
    uint64_t held = (uint64_t)items_of(&buffers) / (uint64_t)row_bytes;
    char *out = buffer(&buffers, out_array, "out", 1, -1, 1);
    if (!out || check_distinct(&buffers))
        goto done;
    uint64_t length = (uint64_t)items_of(&buffers) / (uint64_t)row_bytes;
    int stream = items_of(&buffers) >= STREAM_BYTES && row_bytes % 64 == 0 && (uintptr_t)out % 64 == 0;
    const struct kernels *use = chosen;
    Py_BEGIN_ALLOW_THREADS
    row = first_outside(rows, count, first, length);
    if (positions)
        known = first_outside(positions, count, 0, held);
    if (row == count && known == count)
        use->scatter(source, (size_t)row_bytes, positions, rows, (size_t)count, first, stream, out);
    Py_END_ALLOW_THREADS
    if (row < count)
        PyErr_Format(PyExc_IndexError, "scatter: expected rows in %lld to %lld, found %lld", first,
                     (long long)((uint64_t)first + length - 1), (long long)rows[row]);
    else if (known < count)
        PyErr_Format(PyExc_IndexError, "scatter: expected positions in 0 to %lld, found %lld",
                     (long long)held - 1, (long long)positions[known]);
    else
        result = Py_NewRef(Py_None);
done:
    release(&buffers);
    return result;
}

static PyObject *py_scan(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *stamp_arrays, *out_array, *result = NULL;
    int clock;
    long long first;
    if (!PyArg_ParseTuple(args, "O!iLO", &PyList_Type, &stamp_arrays, &clock, &first, &out_array))
        return NULL;
    struct buffers buffers = {.count = 0};
    struct list stamps = {.count = 0};
    if (list_of(&stamps, stamp_arrays, "stamps", sizeof(int32_t)))
        goto done;
    Py_ssize_t count = 0;
    for (Py_ssize_t i = 0; i < stamps.count; i++)
        count += stamps.views[i].len / (Py_ssize_t)sizeof(int32_t);
    int64_t *out = buffer(&buffers, out_array, "out", sizeof(int64_t), count, 1);
    if (!out || check_apart(&buffers, &stamps))
        goto done;
    const struct kernels *use = chosen;
    size_t found = 0;
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t i = 0; i < stamps.count; i++) {
        size_t length = (size_t)stamps.views[i].len / sizeof(int32_t);
        if (length)
            found += use->scan(stamps.views[i].buf, length, clock, first, out + found);
        first += (int64_t)length;
    }
    Py_END_ALLOW_THREADS
    result = PyLong_FromSize_t(found);
done:
    release(&buffers);
    release_list(&stamps);
    return result;
}

/*
 * Flushes subnormal arguments and results to 0, as XLA does on CPUs. Returns the argument for
 * `restore_subnormals`.
 */
static uint64_t flush_subnormals(void)
{
#if defined(__x86_64__)
    unsigned before = _mm_getcsr();
    _mm_setcsr(before | 0x8040);
    return before;
#elif defined(__aarch64__)
    uint64_t before;
    __asm__ volatile("mrs %0, fpcr" : "=r"(before));
    __asm__ volatile("msr fpcr, %0" ::"r"(before | (1 << 24)));
    return before;
#else
    return 0;
#endif
}

static void restore_subnormals(uint64_t before)
{
#if defined(__x86_64__)
    _mm_setcsr((unsigned)before);
#elif defined(__aarch64__)
    __asm__ volatile("msr fpcr, %0" ::"r"(before));
#else
    (void)before;
#endif
}

/* Gets the buffers of an encoding; `dtype` names the type of `rows`. Returns 0, or -1 with an error. */
static int take_encoding(struct buffers *buffers, struct encoding *job, PyObject *rows, const char *dtype,
                         Py_ssize_t width, PyObject *held, PyObject *error, PyObject *norm)
{
    if (!strcmp(dtype, "float32"))
        job->dtype = FLOAT32;
    else if (!strcmp(dtype, "bfloat16"))
        job->dtype = BFLOAT16;
    else if (!strcmp(dtype, "float16"))
        job->dtype = FLOAT16;
    else {
        PyErr_Format(PyExc_TypeError, "rows: expected float32, bfloat16 or float16, found %s", dtype);
        return -1;
    }
    if (width <= 0 || width > PY_SSIZE_T_MAX / 256) {
        PyErr_Format(PyExc_ValueError, "width: expected a positive number, found %zd", width);
        return -1;
    }
    job->width = (size_t)width;
    if (!(job->rows = buffer(buffers, rows, "rows", job->dtype == FLOAT32 ? 4 : 2, -1, 0)))
        return -1;
    Py_ssize_t items = items_of(buffers), count = items / width;
    if (count * width != items) {
        PyErr_Format(PyExc_ValueError, "rows: expected rows of %zd items, found %zd items", width, items);
        return -1;
    }
    job->count = (size_t)count;
    if (!(job->held = buffer(buffers, held, "held", 1, count, 1)) ||
        !(job->squared_error = buffer(buffers, error, "squared_error", 4, count, 1)) ||
        !(job->squared_norm = buffer(buffers, norm, "squared_norm", 4, count, 1)))
        return -1;
    return 0;
}

static PyObject *py_encode_uniform(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *rows, *codes, *scale, *offset, *held, *error, *norm, *result = NULL;
    const char *dtype;
    Py_ssize_t width;
    struct uniform codec;
    if (!PyArg_ParseTuple(args, "Osn(ipiifff)OOOOOO", &rows, &dtype, &width, &codec.bits, &codec.symmetric,
                          &codec.steps, &codec.refits, &codec.shrink, &codec.smallest, &codec.largest, &codes,
                          &scale, &offset, &held, &error, &norm))
        return NULL;
    if ((codec.bits != 2 && codec.bits != 3 && codec.bits != 4 && codec.bits != 8) ||
        codec.symmetric != (offset == Py_None)) {
        PyErr_SetString(PyExc_ValueError, "codec: expected 2, 3, 4 or 8 bits, and an offset unless symmetric");
        return NULL;
    }
    struct buffers buffers = {.count = 0};
    struct encoding job = {.offset = NULL};
    if (take_encoding(&buffers, &job, rows, dtype, width, held, error, norm))
        goto done;
    Py_ssize_t count = (Py_ssize_t)job.count;
    if (!(job.codes = buffer(&buffers, codes, "codes", 1, count * (Py_ssize_t)packed_bytes(job.width, codec.bits), 1)) ||
        !(job.scale = buffer(&buffers, scale, "scale", 2, count, 1)) ||
        (offset != Py_None && !(job.offset = buffer(&buffers, offset, "offset", 2, count, 1))) ||
        check_distinct(&buffers))
        goto done;
    job.scratch = PyMem_Malloc(scratch_floats(job.width) * sizeof(float));
    if (!job.scratch) {
        PyErr_NoMemory();
        goto done;
    }
    const struct kernels *use = chosen;
    Py_BEGIN_ALLOW_THREADS
    uint64_t before = flush_subnormals();
    use->encode_uniform(&job, &codec);
    restore_subnormals(before);
    Py_END_ALLOW_THREADS
    PyMem_Free(job.scratch);
    result = Py_NewRef(Py_None);
done:
    release(&buffers);
    return result;
}

static PyObject *py_encode_shorter(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *rows, *codes, *held, *error, *norm, *result = NULL;
    const char *dtype;
    Py_ssize_t width;
    float smallest, largest;
    if (!PyArg_ParseTuple(args, "OnsffOOOO", &rows, &width, &dtype, &smallest, &largest, &codes, &held, &error,
                          &norm))
        return NULL;
    if (strcmp(dtype, "bfloat16") && strcmp(dtype, "float16"))
        return PyErr_Format(PyExc_ValueError, "dtype: expected bfloat16 or float16, found %s", dtype);
    struct buffers buffers = {.count = 0};
    struct encoding job = {.offset = NULL};
    if (take_encoding(&buffers, &job, rows, "float32", width, held, error, norm) ||
        !(job.codes = buffer(&buffers, codes, "codes", 2, (Py_ssize_t)job.count * width, 1)) ||
        check_distinct(&buffers))
        goto done;
    const struct kernels *use = chosen;
    Py_BEGIN_ALLOW_THREADS
    uint64_t before = flush_subnormals();
    use->encode_shorter(&job, dtype[0] == 'b' ? BFLOAT16 : FLOAT16, smallest, largest);
    restore_subnormals(before);
    Py_END_ALLOW_THREADS
    result = Py_NewRef(Py_None);
done:
    release(&buffers);
    return result;
}

static PyObject *py_decode_uniform(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *codes, *scale, *offset, *out, *result = NULL;
    Py_ssize_t width;
    struct decoding job = {.offset = NULL};
    if (!PyArg_ParseTuple(args, "OOOinO", &codes, &scale, &offset, &job.bits, &width, &out))
        return NULL;
    if ((job.bits != 2 && job.bits != 3 && job.bits != 4 && job.bits != 8) || width <= 0 ||
        width > PY_SSIZE_T_MAX / 256) {
        PyErr_SetString(PyExc_ValueError, "codec: expected 2, 3, 4 or 8 bits, and a positive width");
        return NULL;
    }
    struct buffers buffers = {.count = 0};
    job.width = (size_t)width;
    job.out = buffer(&buffers, out, "out", 4, -1, 1);
    if (!job.out)
        goto done;
    Py_ssize_t items = items_of(&buffers), count = items / width;
    job.count = (size_t)count;
    if (count * width != items) {
        PyErr_Format(PyExc_ValueError, "out: expected rows of %zd items, found %zd items", width, items);
        goto done;
    }
    if (!(job.codes = buffer(&buffers, codes, "codes", 1, count * (Py_ssize_t)packed_bytes(job.width, job.bits), 0)) ||
        !(job.scale = buffer(&buffers, scale, "scale", 2, count, 0)) ||
        (offset != Py_None && !(job.offset = buffer(&buffers, offset, "offset", 2, count, 0))) ||
        check_distinct(&buffers))
        goto done;
    job.scratch = PyMem_Malloc(job.width + 2 * CHUNK);
    if (!job.scratch) {
        PyErr_NoMemory();
        goto done;
    }
    const struct kernels *use = chosen;
    Py_BEGIN_ALLOW_THREADS
    use->decode_uniform(&job);
    Py_END_ALLOW_THREADS
    PyMem_Free(job.scratch);
    result = Py_NewRef(Py_None);
done:
    release(&buffers);
    return result;
}

static PyObject *py_widen_halves(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *patterns_array, *out_array, *result = NULL;
    if (!PyArg_ParseTuple(args, "OO", &patterns_array, &out_array))
        return NULL;
    struct buffers buffers = {.count = 0};
    const uint16_t *patterns = buffer(&buffers, patterns_array, "patterns", 2, -1, 0);
    if (!patterns)
        goto done;
    Py_ssize_t count = items_of(&buffers);
    float *out = buffer(&buffers, out_array, "out", 4, count, 1);
    if (!out || check_distinct(&buffers))
        goto done;
    const struct kernels *use = chosen;
    Py_BEGIN_ALLOW_THREADS
    use->widen_halves(patterns, (size_t)count, out);
    Py_END_ALLOW_THREADS
    result = Py_NewRef(Py_None);
done:
    release(&buffers);
    return result;
}

/* ---- The module: blocks ---- */

/* Gets the buffer of an array that only some codecs have; the others pass 0 `items` and None. */
static int optional_buffer(struct buffers *buffers, PyObject *array, const char *name, Py_ssize_t itemsize,
                           Py_ssize_t items, int writable, void **found)
{
    *found = NULL;
    if (items == 0 && array == Py_None)
        return 0;
    *found = buffer(buffers, array, name, itemsize, items, writable);
    return *found ? 0 : -1;
}

static int check_codec(int codec, int type)
{
    if (0 <= codec && codec < CODECS && 0 <= type && type < TYPES)
        return 0;
    PyErr_Format(PyExc_ValueError, "expected a codec below %d and a type below %d, found %d and %d",
                 (int)CODECS, (int)TYPES, codec, type);
    return -1;
}

static int check_count(Py_ssize_t count)
{
    if (0 <= count && count <= PY_SSIZE_T_MAX / (BLOCK * 8))
        return 0;
    PyErr_Format(PyExc_ValueError, "count: expected 0 or more blocks, found %zd", count);
    return -1;
}

static Py_ssize_t code_bytes(int codec)
{
    return codec == CHANGE4 || codec == LOG4 ? BLOCK / 2 : BLOCK;
}

/* Gets the decoding table of log8 (the value of each 16-bit point) or log4 (the factors of each step). */
static int take_table(struct buffers *buffers, PyObject *array, int codec, int type, const void **table)
{
    Py_ssize_t itemsize = codec == LOG8 && type != FLOAT32 ? 2 : 4;
    Py_ssize_t items = codec == LOG8 ? NAMED_POINTS : codec == LOG4 ? FACTORS : 0;
    void *found;
    if (optional_buffer(buffers, array, "table", itemsize, items, 0, &found))
        return -1;
    *table = found;
    return 0;
}

/*
 * encode_blocks(codec, type, now, before, out, states, codes, words, steps, table, low, high): returns
 * the number of coded blocks, and the sums of squares of errors and of values.
 */
static PyObject *py_encode_blocks(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *now, *before, *out, *states, *codes, *words, *steps, *table, *result = NULL;
    struct block_encoding one = {.count = 0};
    if (!PyArg_ParseTuple(args, "iiOOOOOOOOII", &one.codec, &one.type, &now, &before, &out, &states, &codes,
                          &words, &steps, &table, &one.low, &one.high) ||
        check_codec(one.codec, one.type))
        return NULL;
    struct buffers buffers = {.count = 0};
    const Py_ssize_t itemsize = one.type == FLOAT32 ? 4 : 2;
    const int is_relative = one.codec == CHANGE4 || one.codec == CHANGE8 || one.codec == LOG4;
    if (!(one.now = buffer(&buffers, now, "now", itemsize, -1, 0)))
        goto done;
    const Py_ssize_t items = items_of(&buffers), count = items / BLOCK;
    if (items % BLOCK) {
        PyErr_SetString(PyExc_ValueError, "now: expected whole blocks");
        goto done;
    }
    one.count = (size_t)count;
    if (before != Py_None && !(one.before = buffer(&buffers, before, "before", itemsize, items, 0)))
        goto done;
    if (!one.before && is_relative) {
        PyErr_SetString(PyExc_ValueError, "before: expected a reference");
        goto done;
    }
    if (take_table(&buffers, table, one.codec, one.type, &one.table))
        goto done;
    if (!(one.states = buffer(&buffers, states, "states", 1, count, 1)) ||
        !(one.out = buffer(&buffers, out, "out", itemsize, items, 1)) ||
        !(one.codes = buffer(&buffers, codes, "codes", 1, count * code_bytes(one.codec), 1)))
        goto done;
    one.past_cache = items * itemsize >= PAST_CACHE_BYTES && (uintptr_t)one.out % 16 == 0;
    void *found;
    if (optional_buffer(&buffers, words, "words", 2, one.codec == LOG4 ? 0 : count, 1, &found))
        goto done;
    one.words = found;
    if (optional_buffer(&buffers, steps, "steps", 1, one.codec < LOG8 ? 0 : count, 1, &found) ||
        check_distinct(&buffers))
        goto done;
    one.steps = found;
    const struct kernels *use = chosen;
    Py_BEGIN_ALLOW_THREADS
    use->encode_blocks(&one);
    Py_END_ALLOW_THREADS
    result = Py_BuildValue("ndd", (Py_ssize_t)one.coded, one.squared_error, one.squared_norm);
done:
    release(&buffers);
    return result;
}

/*
 * Gets the row indices of `count` blocks; None means `count` rows from `first` on. Fails if they do
 * not ascend, or if one is not below `total`.
 */
static int take_rows(struct buffers *buffers, PyObject *array, Py_ssize_t first, Py_ssize_t count,
                     Py_ssize_t total, const int64_t **rows)
{
    *rows = NULL;
    if (array == Py_None) {
        if (0 <= first && first <= total && count <= total - first)
            return 0;
    } else {
        const int64_t *found = buffer(buffers, array, "rows", sizeof(int64_t), count, 0);
        if (!found)
            return -1;
        *rows = found;
        int64_t least = 0;
        Py_ssize_t i = 0;
        for (; i < count && found[i] >= least && found[i] < total; i++)
            least = found[i] + 1;
        if (i == count)
            return 0;
    }
    PyErr_Format(PyExc_IndexError, "rows: expected ascending row indices in 0 to %zd", total - 1);
    return -1;
}

/* decode_blocks(codec, type, rows, first, count, codes, words, steps, table, data) */
static PyObject *py_decode_blocks(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *rows, *codes, *words, *steps, *table, *data, *result = NULL;
    Py_ssize_t first, count;
    struct block_decoding one = {.count = 0};
    if (!PyArg_ParseTuple(args, "iiOnnOOOOO", &one.codec, &one.type, &rows, &first, &count, &codes, &words,
                          &steps, &table, &data) ||
        check_codec(one.codec, one.type) || check_count(count))
        return NULL;
    one.count = (size_t)count, one.first = (size_t)first;
    struct buffers buffers = {.count = 0};
    if (!(one.codes = buffer(&buffers, codes, "codes", 1, count * code_bytes(one.codec), 0)))
        goto done;
    void *found;
    if (optional_buffer(&buffers, words, "words", 2, one.codec == LOG4 ? 0 : count, 0, &found))
        goto done;
    one.words = found;
    if (optional_buffer(&buffers, steps, "steps", 1, one.codec < LOG8 ? 0 : count, 0, &found))
        goto done;
    one.steps = found;
    for (Py_ssize_t i = 0; one.codec == LOG4 && i < count; i++)
        if (one.steps[i] > WIDEST_STEP) {
            PyErr_Format(PyExc_ValueError, "expected steps up to %d, found %d", (int)WIDEST_STEP,
                         (int)one.steps[i]);
            goto done;
        }
    if (take_table(&buffers, table, one.codec, one.type, &one.table))
        goto done;
    if (!(one.data = buffer(&buffers, data, "data", one.type == FLOAT32 ? 4 : 2, -1, 1)) ||
        take_rows(&buffers, rows, first, count, items_of(&buffers) / BLOCK, &one.rows) ||
        check_distinct(&buffers))
        goto done;
    const struct kernels *use = chosen;
    Py_BEGIN_ALLOW_THREADS
    use->decode_blocks(&one);
    Py_END_ALLOW_THREADS
    result = Py_NewRef(Py_None);
done:
    release(&buffers);
    return result;
}

static int check_itemsize(Py_ssize_t itemsize)
{
    if (itemsize == 1 || itemsize == 2 || itemsize == 4 || itemsize == 8)
        return 0;
    PyErr_Format(PyExc_ValueError, "expected elements of 1, 2, 4 or 8 bytes, found %zd", itemsize);
    return -1;
}

/*
 * encode_sparse(itemsize, most, now, before, states, counts, at, changes): returns the number of coded
 * blocks, and of their changed elements.
 */
static PyObject *py_encode_sparse(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *now, *before, *states, *counts, *at, *changes, *result = NULL;
    Py_ssize_t itemsize, most;
    struct sparse_encoding one = {.count = 0};
    if (!PyArg_ParseTuple(args, "nnOOOOOO", &itemsize, &most, &now, &before, &states, &counts, &at, &changes) ||
        check_itemsize(itemsize))
        return NULL;
    if (most < 0 || most > BLOCK)
        return PyErr_Format(PyExc_ValueError, "most: expected 0 to %d, found %zd", (int)BLOCK, most);
    struct buffers buffers = {.count = 0};
    if (!(one.now = buffer(&buffers, now, "now", itemsize, -1, 0)))
        goto done;
    const Py_ssize_t items = items_of(&buffers), count = items / BLOCK;
    if (items % BLOCK) {
        PyErr_SetString(PyExc_ValueError, "now: expected whole blocks");
        goto done;
    }
    one.count = (size_t)count, one.itemsize = (size_t)itemsize, one.most = (size_t)most;
    if (!(one.before = buffer(&buffers, before, "before", itemsize, items, 0)) ||
        !(one.states = buffer(&buffers, states, "states", 1, count, 1)) ||
        !(one.counts = buffer(&buffers, counts, "counts", 2, count, 1)) ||
        !(one.at = buffer(&buffers, at, "at", 1, count * most, 1)) ||
        !(one.changes = buffer(&buffers, changes, "changes", itemsize, count * most, 1)) ||
        check_distinct(&buffers))
        goto done;
    const struct kernels *use = chosen;
    Py_BEGIN_ALLOW_THREADS
    use->encode_sparse(&one);
    Py_END_ALLOW_THREADS
    result = Py_BuildValue("nn", (Py_ssize_t)one.coded, (Py_ssize_t)one.elements);
done:
    release(&buffers);
    return result;
}

/* apply_sparse(itemsize, rows, first, count, counts, at, changes, data) */
static PyObject *py_apply_sparse(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *rows, *counts, *at, *changes, *data, *result = NULL;
    Py_ssize_t itemsize, first, count;
    struct sparse one = {.count = 0};
    if (!PyArg_ParseTuple(args, "nOnnOOOO", &itemsize, &rows, &first, &count, &counts, &at, &changes,
                          &data) ||
        check_itemsize(itemsize) || check_count(count))
        return NULL;
    one.count = (size_t)count, one.itemsize = (size_t)itemsize, one.first = (size_t)first;
    struct buffers buffers = {.count = 0};
    if (!(one.counts = buffer(&buffers, counts, "counts", 2, count, 0)))
        goto done;
    size_t total = 0;
    unsigned most = 0;
    for (size_t i = 0; i < one.count; i++) {
        total += one.counts[i];
        most = one.counts[i] > most ? one.counts[i] : most;
    }
    if (most > BLOCK) {
        PyErr_Format(PyExc_ValueError, "counts: expected up to %d, found %u", (int)BLOCK, most);
        goto done;
    }
    if (!(one.at = buffer(&buffers, at, "at", 1, (Py_ssize_t)total, 0)) ||
        !(one.changes = buffer(&buffers, changes, "changes", itemsize, (Py_ssize_t)total, 0)) ||
        !(one.data = buffer(&buffers, data, "data", itemsize, -1, 1)) ||
        take_rows(&buffers, rows, first, count, items_of(&buffers) / BLOCK, &one.rows) ||
        check_distinct(&buffers))
        goto done;
    int ascends;
    const struct kernels *use = chosen;
    Py_BEGIN_ALLOW_THREADS
    ascends = use->apply_sparse(&one);
    Py_END_ALLOW_THREADS
    if (!ascends) {
        PyErr_SetString(PyExc_ValueError, "expected ascending positions, found unsorted ones");
        goto done;
    }
    result = Py_NewRef(Py_None);
done:
    release(&buffers);
    return result;
}

/* ---- The module: checksums ---- */

static PyObject *py_crc32c_blocks(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *data_array, *out_array, *sums_array, *result = NULL;
    Py_ssize_t block_bytes, used;
    unsigned int crc;
    if (!PyArg_ParseTuple(args, "OOnnIO", &data_array, &out_array, &block_bytes, &used, &crc, &sums_array))
        return NULL;
    if (!has_crc32c)
        Py_RETURN_FALSE;
    struct buffers buffers = {.count = 0};
    if (used < 0 || used >= block_bytes) {
        PyErr_SetString(PyExc_ValueError, "crc32c_blocks: expected a first block that is not complete");
        return NULL;
    }
    const char *data = buffer(&buffers, data_array, "data", 1, -1, 0);
    if (!data)
        goto done;
    Py_ssize_t nbytes = items_of(&buffers);
    if (nbytes > PY_SSIZE_T_MAX - block_bytes) {
        PyErr_SetString(PyExc_ValueError, "crc32c_blocks: expected shorter blocks");
        goto done;
    }
    void *out;
    if (optional_buffer(&buffers, out_array, "out", 1, out_array == Py_None ? 0 : nbytes, 1, &out))
        goto done;
    Py_ssize_t count = nbytes ? (used + nbytes - 1) / block_bytes + 1 : 0;
    uint32_t *sums = buffer(&buffers, sums_array, "sums", sizeof(uint32_t), count, 1);
    if (!sums || check_distinct(&buffers))
        goto done;
    Py_BEGIN_ALLOW_THREADS
    crc32c_blocks(data, (size_t)nbytes, out, (size_t)block_bytes, (size_t)used, crc, sums);
    Py_END_ALLOW_THREADS
    result = Py_NewRef(Py_True);
done:
    release(&buffers);
    return result;
}

/* ---- The module ---- */

static PyMethodDef methods[] = {
    {"paths", py_paths, METH_NOARGS, "Names of the instruction sets that this CPU supports."},
    {"path", py_path, METH_NOARGS, "Name of the instruction set in use."},
    {"use", py_use, METH_VARARGS, "Uses one of the supported instruction sets."},
    /* Rows. */
    {"gather", py_gather, METH_VARARGS, "Copies rows of several arrays into another array."},
    {"scatter", py_scatter, METH_VARARGS, "Copies rows of an array to rows of another one."},
    {"scan", py_scan, METH_VARARGS, "Writes the indices of stamps after a clock; returns how many."},
    {"encode_uniform", py_encode_uniform, METH_VARARGS, "Encodes rows as uniform codes."},
    {"encode_shorter", py_encode_shorter, METH_VARARGS, "Encodes float32 rows as 16-bit floats."},
    {"decode_uniform", py_decode_uniform, METH_VARARGS, "Decodes uniform codes to float32 rows."},
    {"widen_halves", py_widen_halves, METH_VARARGS, "Converts float16 to float32."},
    /* Blocks. */
    {"encode_blocks", py_encode_blocks, METH_VARARGS, "Encodes blocks with a lossy codec."},
    {"decode_blocks", py_decode_blocks, METH_VARARGS, "Decodes blocks of a lossy codec in place."},
    {"encode_sparse", py_encode_sparse, METH_VARARGS, "Finds the few elements that changed."},
    {"apply_sparse", py_apply_sparse, METH_VARARGS, "Applies changes of elements in place."},
    /* Checksums. */
    {"crc32c_blocks", py_crc32c_blocks, METH_VARARGS, "Copies bytes and computes the CRC32C of each block."},
    {NULL, NULL, 0, NULL},
};

/* The source's CRC32, by which `deltackpt/kernels.py` recognizes a module that is out of date. */
#ifndef SOURCE_CRC32
#define SOURCE_CRC32 0
#endif

static int run_module(PyObject *module)
{
    find_supported();
    find_crc32c();
    return PyModule_AddIntConstant(module, "SOURCE_CRC32", SOURCE_CRC32);
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, (void *)run_module}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "deltackpt._kernels",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__kernels(void)
{
    return PyModuleDef_Init(&definition);
}

#else /* TARGET */

/*
 * The kernels: compiled for each instruction set, with
 *   TARGET        the attribute of each function,
 *   LANES         the float32 values of a vector,
 *   KERNEL(name)  the name of a function or a type of this instruction set.
 */

#define INLINE static inline __attribute__((always_inline)) TARGET
#define PARTS (CHUNK / LANES)
#define chunk KERNEL(chunk)
#define floats KERNEL(floats)
#define ints KERNEL(ints)
#define bytes KERNEL(bytes)
#define halves KERNEL(halves)

/* ---- Vectors ---- */

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));
typedef uint8_t bytes __attribute__((vector_size(LANES)));

/* 16 columns of a row. */
struct chunk {
    floats part[PARTS];
};

INLINE floats KERNEL(load)(const float *from)
{
    floats x;
    memcpy(&x, from, sizeof x);
    return x;
}

INLINE floats KERNEL(splat)(float x)
{
    return x - (floats){0};
}

INLINE floats KERNEL(select)(ints mask, floats a, floats b)
{
    return (floats)((mask & (ints)a) | (~mask & (ints)b));
}

/* a < b ? a : b, which is what minps computes, also for NaN and zeros. */
INLINE floats KERNEL(least)(floats a, floats b)
{
#if LANES == 16
    return (floats)_mm512_min_ps((__m512)a, (__m512)b);
#elif LANES == 8
    return (floats)_mm256_min_ps((__m256)a, (__m256)b);
#else
    return LEAST4(a, b);
#endif
}

INLINE floats KERNEL(most)(floats a, floats b)
{
#if LANES == 16
    return (floats)_mm512_max_ps((__m512)a, (__m512)b);
#elif LANES == 8
    return (floats)_mm256_max_ps((__m256)a, (__m256)b);
#elif defined(__x86_64__)
    return (floats)_mm_max_ps((__m128)a, (__m128)b);
#else
    return KERNEL(select)(a > b, a, b);
#endif
}

INLINE floats KERNEL(square_root)(floats x)
{
#if LANES == 16
    return (floats)_mm512_sqrt_ps((__m512)x);
#elif LANES == 8
    return (floats)_mm256_sqrt_ps((__m256)x);
#else
    floats roots;
    for (int i = 0; i < LANES; i++)
        roots[i] = __builtin_sqrtf(x[i]);
    return roots;
#endif
}

/* Whether a lane of a mask is set. */
INLINE int KERNEL(any)(ints mask)
{
#if LANES == 16
    return _mm512_movepi32_mask((__m512i)mask) != 0;
#elif LANES == 8
    return _mm256_movemask_ps((__m256)mask);
#else
    return (mask[0] | mask[1] | mask[2] | mask[3]) != 0;
#endif
}

INLINE floats KERNEL(magnitude)(floats x)
{
    return (floats)((ints)x & 0x7FFFFFFF);
}

/* Rounds magnitudes below 2**22 to integers, half to even; the sign of a zero is not defined. */
INLINE floats KERNEL(nearest)(floats x)
{
#if LANES == 16
    return (floats)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif LANES == 8
    return (floats)_mm256_round_ps((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    return x + ROUND - ROUND;
#endif
}

/* Rounds to codes: integers from `low` to `high`, as floats. */
INLINE floats KERNEL(code)(floats place, floats low, floats high)
{
    return KERNEL(nearest)(KERNEL(least)(KERNEL(most)(place, low), high));
}

/* Rounds magnitudes below 2**22 to integers, half to even. */
INLINE ints KERNEL(integer)(floats x)
{
#if LANES == 16
    return (ints)_mm512_cvtps_epi32((__m512)x);
#elif LANES == 8
    return (ints)_mm256_cvtps_epi32((__m256)x);
#else
    return (ints)(x + ROUND) - ROUND_BITS;
#endif
}

/* Stores 16 integers as bytes. */
INLINE void KERNEL(store_bytes)(const ints *x, uint8_t *out)
{
#if LANES == 8
    __m256i words = _mm256_packs_epi32((__m256i)x[0], (__m256i)x[1]);
    __m128i mixed = _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128((__m128i *)out, _mm_shuffle_epi32(mixed, _MM_SHUFFLE(3, 1, 2, 0)));
#else
    for (int p = 0; p < PARTS; p++) {
        bytes narrow = __builtin_convertvector(x[p], bytes);
        memcpy(out + p * LANES, &narrow, sizeof narrow);
    }
#endif
}

/* Loads 16 columns of a row; past its end, column 0 is repeated. */
INLINE struct chunk KERNEL(columns)(const float *row, size_t at, size_t width)
{
    struct chunk x;
    float padded[CHUNK];
    const float *from = row + at;
    if (width - at < CHUNK) {
        for (size_t i = 0; i < CHUNK; i++)
            padded[i] = row[at + i < width ? at + i : 0];
        from = padded;
    }
    for (int p = 0; p < PARTS; p++)
        x.part[p] = KERNEL(load)(from + p * LANES);
    return x;
}

/* Adds the squares of the columns before `width`. */
INLINE struct chunk KERNEL(add_squares)(struct chunk sums, struct chunk x, size_t at, size_t width)
{
    for (int p = 0; p < PARTS; p++) {
        floats square = x.part[p] * x.part[p];
        if (width - at < CHUNK) {
            ints column;
            memcpy(&column, COLUMNS + p * LANES, sizeof column);
            square = (floats)((ints)square & (column < (int32_t)(width - at)));
        }
        sums.part[p] += square;
    }
    return sums;
}

/* Copied by parts: a copy of the whole struct would keep it in memory. */
INLINE void KERNEL(quarters)(struct chunk x, quad *quarters)
{
    for (int p = 0; p < PARTS; p++)
        memcpy(quarters + p * LANES / 4, &x.part[p], sizeof x.part[p]);
}

/* Adds every fourth of 16 sums. */
INLINE quad KERNEL(added)(struct chunk sums)
{
    quad q[4];
    KERNEL(quarters)(sums, q);
    return (q[0] + q[2]) + (q[1] + q[3]);
}

INLINE quad KERNEL(minimum)(struct chunk x)
{
    quad q[4];
    KERNEL(quarters)(x, q);
    return LEAST4(LEAST4(q[0], q[2]), LEAST4(q[1], q[3]));
}

INLINE void KERNEL(transposed)(const quad *quads, floats *columns)
{
    float parts[4][LANES];
    for (int i = 0; i < LANES; i++)
        for (int k = 0; k < 4; k++)
            parts[k][i] = quads[i][k];
    memcpy(columns, parts, sizeof parts);
}

/* The sum of each quad. */
INLINE floats KERNEL(totals)(const quad *quads)
{
    floats at[4];
    KERNEL(transposed)(quads, at);
    return (at[0] + at[2]) + (at[1] + at[3]);
}

INLINE floats KERNEL(minima)(const quad *quads)
{
    floats at[4];
    KERNEL(transposed)(quads, at);
    return KERNEL(least)(KERNEL(least)(at[0], at[2]), KERNEL(least)(at[1], at[3]));
}

/* ---- Rows: shorter floats ---- */

struct KERNEL(rounded) {
    floats value;
    ints pattern;
};
#define rounded KERNEL(rounded)

/* To bfloat16, half to even; the pattern is that of the bfloat16. */
INLINE struct rounded KERNEL(round_brain)(floats value)
{
    ints pattern = (ints)value;
    pattern = (pattern + 0x7FFF + ((pattern >> 16) & 1)) & (int32_t)0xFFFF0000;
    return (struct rounded){(floats)pattern, (pattern >> 16) & 0xFFFF};
}

/* To float16, for magnitudes below 65520; subnormal float32 become 0, without a sign. */
INLINE struct rounded KERNEL(round_half)(floats value)
{
    floats magnitude = KERNEL(magnitude)(value);
    ints normal = (ints)magnitude;
    normal = (normal + 0xFFF + ((normal >> 13) & 1)) & (int32_t)0xFFFFE000;
    /* Subnormal float16 are multiples of 2**-24. */
    ints small = magnitude < 0x1p-14f;
    floats units = KERNEL(least)(magnitude, KERNEL(splat)(0x1p-14f)) * 0x1p24f + ROUND;
    ints pattern = (small & ((ints)units - ROUND_BITS)) | (~small & ((normal >> 13) - (112 << 10)));
    floats found = KERNEL(select)(small, (units - ROUND) * 0x1p-24f, (floats)normal);
    ints negative = value <= -SMALLEST_NORMAL;
    return (struct rounded){(floats)((ints)found | (negative & INT32_MIN)), pattern | (negative & 0x8000)};
}

INLINE struct rounded KERNEL(rounded_to)(enum dtype dtype, floats value)
{
    return dtype == BFLOAT16 ? KERNEL(round_brain)(value) : KERNEL(round_half)(value);
}

INLINE floats KERNEL(widened)(enum dtype dtype, halves patterns)
{
    ints pattern = __builtin_convertvector(patterns, ints);
    if (dtype == BFLOAT16)
        return (floats)(pattern << 16);
    ints magnitude = pattern & 0x7FFF;
    ints normal = (magnitude << 13) + (112 << 23);
    normal += (magnitude >= 0x7C00) & (112 << 23); /* Infinity and NaN. */
    floats small = __builtin_convertvector(magnitude, floats) * 0x1p-24f;
    floats found = KERNEL(select)(magnitude < 0x400, small, (floats)normal);
    return (floats)((ints)found | ((pattern & 0x8000) << 16));
}

/* Returns the row as float32: itself, or converted into `out`. */
INLINE const float *KERNEL(float_row)(const struct encoding *job, size_t row, float *out)
{
    size_t width = job->width, at = 0;
    if (job->dtype == FLOAT32)
        return (const float *)job->rows + row * width;
    const uint16_t *from = (const uint16_t *)job->rows + row * width;
    for (; at + LANES <= width; at += LANES) {
        halves patterns;
        memcpy(&patterns, from + at, sizeof patterns);
        floats values = KERNEL(widened)(job->dtype, patterns);
        memcpy(out + at, &values, sizeof values);
    }
    for (; at < width; at++)
        out[at] = KERNEL(widened)(job->dtype, (halves){from[at]})[0];
    return out;
}

/* ---- Rows: their ranges ---- */

/* Of LANES rows. */
struct KERNEL(ranges) {
    floats low, high, norm;
    ints held;
};
#define ranges KERNEL(ranges)

/*
 * See `save.encode`. The range of a row that is not held is 0 to 0, as that of rows after the last.
 * `whole` is 1 if the width is a multiple of 16.
 */
INLINE struct ranges KERNEL(ranges_of)(const float *const *rows, size_t count, size_t width, int whole,
                                       float smallest, float largest)
{
    quad lows[LANES], minus_highs[LANES], norms[LANES];
    for (size_t i = count; i < LANES; i++)
        lows[i] = minus_highs[i] = norms[i] = (quad){0};
    for (size_t i = 0; i < count; i++) {
        struct chunk low = KERNEL(columns)(rows[i], 0, whole ? CHUNK : width), high = low, squares = {{{0}}};
        for (size_t at = 0; at < width; at += CHUNK) {
            size_t stop = whole ? at + CHUNK : width;
            struct chunk x = KERNEL(columns)(rows[i], at, stop);
            __builtin_prefetch((const char *)(rows[i] + at) + PREFETCH_BYTES);
            for (int p = 0; p < PARTS; p++) {
                low.part[p] = KERNEL(least)(low.part[p], x.part[p]);
                high.part[p] = KERNEL(most)(high.part[p], x.part[p]);
            }
            squares = KERNEL(add_squares)(squares, x, at, stop);
        }
        for (int p = 0; p < PARTS; p++)
            high.part[p] = -high.part[p];
        lows[i] = KERNEL(minimum)(low), minus_highs[i] = KERNEL(minimum)(high);
        norms[i] = KERNEL(added)(squares);
    }
    struct ranges found = {KERNEL(minima)(lows), -KERNEL(minima)(minus_highs), KERNEL(totals)(norms), {0}};
    floats greatest = KERNEL(most)(-found.low, found.high);
    /* The norm of a row with infinity or NaN is infinite or NaN. */
    found.held = (found.norm <= 0x1.fffffep127f) & (greatest <= largest);
    ints tiny = found.held & (greatest < smallest);
    for (size_t i = 0; KERNEL(any)(tiny) && i < count; i++) {
        /* Comparisons flush subnormal numbers to 0: only the patterns distinguish them. */
        uint32_t any = 0;
        for (size_t at = 0; tiny[i] && at < width; at++)
            any |= magnitude(rows[i][at]);
        found.held[i] = any ? 0 : found.held[i];
    }
    found.low = (floats)((ints)found.low & found.held);
    found.high = (floats)((ints)found.high & found.held);
    found.norm = (floats)((ints)found.norm & found.held);
    return found;
}

/* Stores whether rows are held, and their sums of squares. */
INLINE void KERNEL(store_figures)(const struct encoding *job, size_t first, size_t count, struct ranges found,
                                  floats error)
{
    for (size_t i = 0; i < count; i++)
        job->held[first + i] = found.held[i] & 1;
    memcpy(job->squared_error + first, &error, count * sizeof(float));
    memcpy(job->squared_norm + first, &found.norm, count * sizeof(float));
}

/* ---- Rows: codecs of shorter floats ---- */

INLINE void KERNEL(shorten)(const struct encoding *job, enum dtype dtype, float smallest, float largest)
{
    size_t width = job->width;
    for (size_t first = 0; first < job->count; first += LANES) {
        size_t count = job->count - first < LANES ? job->count - first : LANES;
        const float *rows[LANES];
        quad errors[LANES];
        for (size_t i = 0; i < LANES; i++)
            errors[i] = (quad){0};
        for (size_t i = 0; i < count; i++)
            rows[i] = (const float *)job->rows + (first + i) * width;
        struct ranges found = KERNEL(ranges_of)(rows, count, width, 0, smallest, largest);
        for (size_t i = 0; i < count; i++) {
            uint16_t *out = (uint16_t *)job->codes + (first + i) * width;
            struct chunk squares = {{{0}}};
            if (!found.held[i])
                memset(out, 0, width * sizeof *out);
            for (size_t at = 0; found.held[i] && at < width; at += CHUNK) {
                struct chunk x = KERNEL(columns)(rows[i], at, width);
                halves patterns[PARTS];
                for (int p = 0; p < PARTS; p++) {
                    struct rounded y = KERNEL(rounded_to)(dtype, x.part[p]);
                    patterns[p] = __builtin_convertvector(y.pattern, halves);
                    x.part[p] = y.value - x.part[p];
                }
                memcpy(out + at, patterns, (width - at < CHUNK ? width - at : CHUNK) * sizeof *out);
                squares = KERNEL(add_squares)(squares, x, at, width);
            }
            errors[i] = KERNEL(added)(squares);
        }
        KERNEL(store_figures)(job, first, count, found, KERNEL(totals)(errors));
    }
}

static TARGET void KERNEL(encode_shorter)(const struct encoding *job, enum dtype dtype, float smallest,
                                          float largest)
{
    if (dtype == BFLOAT16)
        KERNEL(shorten)(job, BFLOAT16, smallest, largest);
    else
        KERNEL(shorten)(job, FLOAT16, smallest, largest);
}

/* ---- Rows: uniform codes. The parameters of LANES rows are computed at once. ---- */

struct KERNEL(parameters) {
    floats scale, offset;
    ints scale_pattern, offset_pattern;
};
#define parameters KERNEL(parameters)

/* The levels of a codec: its codes minus `middle` range from `lowest` to `highest`. */
struct KERNEL(levels) {
    float lowest, highest, middle, step;
};
#define levels KERNEL(levels)

INLINE struct levels KERNEL(levels_of)(const struct uniform *codec)
{
    float middle = (float)(1 << (codec->bits - 1));
    float lowest = codec->symmetric ? 1 - middle : -middle, highest = middle - 1;
    float count = codec->symmetric ? highest : highest - lowest;
    return (struct levels){lowest, highest, middle, 1 / count};
}

INLINE floats KERNEL(inverse)(floats scale)
{
    ints positive = scale > 0;
    floats divisor = KERNEL(select)(positive, scale, KERNEL(splat)(1));
    return (floats)((ints)(1 / divisor) & positive);
}

/* Rounded to float16, or to bfloat16 if that cannot represent them. */
INLINE struct parameters KERNEL(stored)(struct levels levels, floats scale, floats offset)
{
    floats reach = KERNEL(magnitude)(offset) + levels.middle * scale;
    ints half = (reach < FLOAT16_BELOW) & ((scale >= FLOAT16_SCALE) | (scale == 0));
    struct rounded half_scale = KERNEL(round_half)(scale), half_offset = KERNEL(round_half)(offset);
    struct rounded brain_scale = KERNEL(round_brain)(scale), brain_offset = KERNEL(round_brain)(offset);
    return (struct parameters){
        KERNEL(select)(half, half_scale.value, brain_scale.value),
        KERNEL(select)(half, half_offset.value, brain_offset.value),
        (half & half_scale.pattern) | (~half & (brain_scale.pattern | 0x8000)),
        (half & half_offset.pattern) | (~half & brain_offset.pattern),
    };
}

/* The parameters that spread the codes over a range. */
INLINE struct parameters KERNEL(spread)(const struct uniform *codec, floats low, floats high)
{
    struct levels levels = KERNEL(levels_of)(codec);
    if (codec->symmetric)
        return KERNEL(stored)(levels, KERNEL(most)(-low, high) * levels.step, (floats){0});
    floats scale = (high - low) * levels.step;
    return KERNEL(stored)(levels, scale, low + levels.middle * scale);
}

/* The l2 errors of LANES rows, given by columns; infinite if a scale is 0. */
INLINE floats KERNEL(error_of)(const struct uniform *codec, const float *columns, size_t width,
                               struct parameters at)
{
    struct levels levels = KERNEL(levels_of)(codec);
    floats inverse = KERNEL(inverse)(at.scale), sum = {0};
    floats lowest = KERNEL(splat)(levels.lowest), highest = KERNEL(splat)(levels.highest);
    for (size_t column = 0; column < width; column++) {
        floats place = (KERNEL(load)(columns + column * LANES) - at.offset) * inverse;
        floats missed = KERNEL(code)(place, lowest, highest) - place;
        sum += missed * missed;
    }
    floats error = KERNEL(square_root)(sum) * at.scale;
    return KERNEL(select)(at.scale > 0, error, KERNEL(splat)(__builtin_inff()));
}

/* Fits scale and offset to the codes by least squares; `error` receives the l2 error before the fit. */
INLINE struct parameters KERNEL(fitted)(const struct uniform *codec, const float *columns, size_t width,
                                        struct parameters at, floats *error)
{
    struct levels levels = KERNEL(levels_of)(codec);
    floats inverse = KERNEL(inverse)(at.scale);
    floats lowest = KERNEL(splat)(levels.lowest), highest = KERNEL(splat)(levels.highest);
    floats sum = {0}, code = {0}, place = {0}, square = {0}, product = {0};
    for (size_t column = 0; column < width; column++) {
        floats x = (KERNEL(load)(columns + column * LANES) - at.offset) * inverse;
        floats k = KERNEL(code)(x, lowest, highest), missed = k - x;
        sum += missed * missed;
        code += k;
        place += x;
        square += k * k;
        product += k * x;
    }
    *error = KERNEL(select)(at.scale > 0, KERNEL(square_root)(sum) * at.scale,
                            KERNEL(splat)(__builtin_inff()));
    float share = 1 / (float)width;
    floats spread = square - code * code * share;
    ints fits = spread > 0;
    floats slope = (product - code * place * share) / KERNEL(select)(fits, spread, KERNEL(splat)(1));
    fits &= slope > 0;
    slope = KERNEL(select)(fits, slope, KERNEL(splat)(1));
    floats shift = (place - slope * code) * share;
    return KERNEL(stored)(levels, at.scale * slope, at.offset + at.scale * shift);
}

/* Finds the best range of a search: each step shrinks the end that leaves the smaller error. */
INLINE void KERNEL(shrink)(const struct uniform *codec, const float *columns, size_t width, floats *low,
                           floats *high)
{
    float count = (float)((1 << codec->bits) - 1);
    float step = 1 / count;
    floats now_low = *low, now_high = *high, best = KERNEL(splat)(__builtin_inff());
    floats move = (now_high - now_low) * codec->shrink, highest = KERNEL(splat)(count);
    for (int i = 0; i < codec->steps; i++) {
        floats raised_low = now_low + move, lowered_high = now_high - move;
        floats raised_scale = (now_high - raised_low) * step, lowered_scale = (lowered_high - now_low) * step;
        floats raised_inverse = KERNEL(inverse)(raised_scale), raised = {0};
        floats lowered_inverse = KERNEL(inverse)(lowered_scale), lowered = {0};
        for (size_t column = 0; column < width; column++) {
            floats x = KERNEL(load)(columns + column * LANES);
            floats a = (x - raised_low) * raised_inverse, b = (x - now_low) * lowered_inverse;
            floats missed_a = KERNEL(code)(a, (floats){0}, highest) - a;
            floats missed_b = KERNEL(code)(b, (floats){0}, highest) - b;
            raised += missed_a * missed_a;
            lowered += missed_b * missed_b;
        }
        raised = KERNEL(square_root)(raised) * raised_scale;
        lowered = KERNEL(square_root)(lowered) * lowered_scale;
        ints better = raised < lowered;
        now_low = KERNEL(select)(better, raised_low, now_low);
        now_high = KERNEL(select)(better, now_high, lowered_high);
        floats error = KERNEL(least)(raised, lowered);
        ints chosen = error < best;
        best = KERNEL(select)(chosen, error, best);
        *low = KERNEL(select)(chosen, now_low, *low);
        *high = KERNEL(select)(chosen, now_high, *high);
    }
}

INLINE struct parameters KERNEL(better)(struct parameters a, floats a_error, struct parameters b,
                                        floats b_error)
{
    ints chosen = a_error < b_error;
    return (struct parameters){
        KERNEL(select)(chosen, a.scale, b.scale),
        KERNEL(select)(chosen, a.offset, b.offset),
        (chosen & a.scale_pattern) | (~chosen & b.scale_pattern),
        (chosen & a.offset_pattern) | (~chosen & b.offset_pattern),
    };
}

/* Finds the best of the whole range, the range that `shrink` finds, and each successive fit. */
static TARGET void KERNEL(search)(const struct uniform *codec, const float *columns, size_t width, floats low,
                                  floats high, struct parameters *best)
{
    struct parameters candidate = KERNEL(spread)(codec, low, high);
    floats best_error = KERNEL(splat)(__builtin_inff()), error;
    *best = candidate;
    if (codec->shrink > 0) {
        best_error = KERNEL(error_of)(codec, columns, width, candidate);
        KERNEL(shrink)(codec, columns, width, &low, &high);
        candidate = KERNEL(spread)(codec, low, high);
    }
    for (int i = 0; i <= codec->refits; i++) {
        struct parameters next = candidate;
        if (i < codec->refits)
            next = KERNEL(fitted)(codec, columns, width, candidate, &error);
        else
            error = KERNEL(error_of)(codec, columns, width, candidate);
        *best = KERNEL(better)(candidate, error, *best, best_error);
        best_error = KERNEL(least)(error, best_error);
        candidate = next;
    }
}

/* Writes the codes of a row, in [0, 2**bits), one per byte; returns the squared error in four parts. */
INLINE quad KERNEL(quantized)(enum dtype dtype, int whole, int scaled, struct levels levels, const float *row,
                              size_t width, float scale, float offset, float inverse, uint8_t *codes)
{
    floats lowest = KERNEL(splat)(levels.lowest), highest = KERNEL(splat)(levels.highest);
    struct chunk squares = {{{0}}};
    for (size_t at = 0; at < width; at += CHUNK) {
        size_t stop = whole ? at + CHUNK : width;
        struct chunk x = KERNEL(columns)(row, at, stop);
        ints code[PARTS];
        for (int p = 0; p < PARTS; p++) {
            floats shifted = x.part[p] - offset, place = shifted * inverse;
            ints integer = KERNEL(integer)(KERNEL(least)(KERNEL(most)(place, lowest), highest));
            floats found = __builtin_convertvector(integer, floats);
            if (dtype != FLOAT32)
                x.part[p] = KERNEL(rounded_to)(dtype, found * scale + offset).value - x.part[p];
            else
                x.part[p] = scaled ? (found - place) * scale : shifted;
            code[p] = integer + (int32_t)levels.middle;
        }
        KERNEL(store_bytes)(code, codes + at);
        squares = KERNEL(add_squares)(squares, x, at, stop);
    }
    return KERNEL(added)(squares);
}

/* Packs `part` bits of each code: see `deltackpt/codecs/packing.py`. Codes after the last are 0. */
INLINE void KERNEL(pack_part)(const uint8_t *restrict codes, size_t width, int part, int shift,
                              uint8_t *restrict out)
{
    size_t plane = plane_bytes(width, (size_t)part);
    uint8_t mask = (uint8_t)((1 << part) - 1);
    for (size_t j = 0; j < plane; j++) {
        unsigned packed = 0;
        for (int place = 0; place < 8 / part; place++)
            packed |= (unsigned)((codes[(size_t)place * plane + j] >> shift) & mask) << (place * part);
        out[j] = (uint8_t)packed;
    }
}

INLINE void KERNEL(pack)(uint8_t *codes, size_t width, int bits, uint8_t *out)
{
    memset(codes + width, 0, CHUNK);
    if (bits == 8)
        memcpy(out, codes, width);
    else if (bits == 4)
        KERNEL(pack_part)(codes, width, 4, 0, out);
    else
        KERNEL(pack_part)(codes, width, 2, 0, out);
    if (bits == 3)
        KERNEL(pack_part)(codes, width, 1, 2, out + plane_bytes(width, 2));
}

/* Encodes up to LANES rows; `plain` is 1 if they are float32, and the width a multiple of 16. */
INLINE void KERNEL(encode_rows)(const struct encoding *job, const struct uniform *codec, int bits, int plain,
                                size_t first, size_t count)
{
    size_t width = job->width, stride = width + 2 * CHUNK;
    float *converted = job->scratch, *columns = converted + 16 * width, *zeros = columns + 16 * width;
    uint8_t *codes = (uint8_t *)(zeros + width);
    const float *rows[LANES];
    for (size_t i = 0; i < count; i++)
        rows[i] = plain ? (const float *)job->rows + (first + i) * width
                        : KERNEL(float_row)(job, first + i, converted + i * width);
    struct ranges found = KERNEL(ranges_of)(rows, count, width, plain, codec->smallest, codec->largest);
    for (size_t i = 0; KERNEL(any)(~found.held) && i < count; i++)
        rows[i] = found.held[i] ? rows[i] : zeros;
    struct parameters use;
    if (codec->shrink > 0 || codec->refits) {
        for (size_t i = 0; i < LANES; i++)
            for (size_t column = 0; column < width; column++)
                columns[column * LANES + i] = i < count ? rows[i][column] : 0;
        KERNEL(search)(codec, columns, width, found.low, found.high, &use);
    } else {
        use = KERNEL(spread)(codec, found.low, found.high);
    }
    struct levels levels = KERNEL(levels_of)(codec);
    floats inverse = KERNEL(inverse)(use.scale);
    float scales[LANES], offsets[LANES], inverses[LANES];
    memcpy(scales, &use.scale, sizeof scales);
    memcpy(offsets, &use.offset, sizeof offsets);
    memcpy(inverses, &inverse, sizeof inverses);
    int scaled = plain && !KERNEL(any)(use.scale <= 0);
    quad errors[LANES];
    for (size_t i = count; i < LANES; i++)
        errors[i] = (quad){0};
    for (size_t i = 0; i < count; i++) {
        enum dtype dtype = plain ? FLOAT32 : job->dtype;
        uint8_t *out = codes + i * stride;
        float scale = scales[i], offset = offsets[i], inverse = inverses[i];
        if (scaled)
            errors[i] = KERNEL(quantized)(FLOAT32, 1, 1, levels, rows[i], width, scale, offset, inverse, out);
        else
            errors[i] = KERNEL(quantized)(dtype, 0, scale > 0, levels, rows[i], width, scale, offset, inverse, out);
    }
    KERNEL(store_figures)(job, first, count, found, KERNEL(totals)(errors));
    halves patterns = __builtin_convertvector(use.scale_pattern, halves);
    memcpy(job->scale + first, &patterns, count * sizeof *job->scale);
    patterns = __builtin_convertvector(use.offset_pattern, halves);
    if (job->offset)
        memcpy(job->offset + first, &patterns, count * sizeof *job->offset);
    /* Codes are packed once they have reached the cache: loads of several recent stores are slow. */
    size_t row_bytes = packed_bytes(width, bits);
    for (size_t i = 0; i < count; i++)
        KERNEL(pack)(codes + i * stride, width, bits, (uint8_t *)job->codes + (first + i) * row_bytes);
}

/* Encodes rows whose width is a multiple of 16 or not, whatever their type. */
static __attribute__((noinline)) TARGET void KERNEL(encode_any)(const struct encoding *job,
                                                                const struct uniform *codec, size_t row)
{
    for (; row < job->count; row += LANES)
        KERNEL(encode_rows)(job, codec, codec->bits, 0, row, job->count - row < LANES ? job->count - row : LANES);
}

static TARGET void KERNEL(encode_uniform)(const struct encoding *job, const struct uniform *codec)
{
    size_t row = 0, plain = job->dtype == FLOAT32 && job->width % CHUNK == 0 ? job->count / LANES * LANES : 0;
    memset(job->scratch + 32 * job->width, 0, job->width * sizeof(float));
    for (; codec->bits == 4 && row < plain; row += LANES)
        KERNEL(encode_rows)(job, codec, 4, 1, row, LANES);
    for (; row < plain; row += LANES)
        KERNEL(encode_rows)(job, codec, codec->bits, 1, row, LANES);
    KERNEL(encode_any)(job, codec, row);
}

/* ---- Rows: decoding ---- */

/* Parameters of up to LANES rows: float16, or bfloat16 if the scale has its sign bit set. */
INLINE void KERNEL(parameters_of)(const uint16_t *scale, const uint16_t *patterns, size_t count, uint16_t mask,
                                  float *out)
{
    halves scales = {0}, found = {0};
    memcpy(&scales, scale, count * sizeof *scale);
    memcpy(&found, patterns, count * sizeof *patterns);
    ints brain = __builtin_convertvector(scales, ints) >= 0x8000;
    found &= mask;
    floats values = KERNEL(select)(brain, KERNEL(widened)(BFLOAT16, found), KERNEL(widened)(FLOAT16, found));
    memcpy(out, &values, sizeof values);
}

/* The inverse of `pack_part`: adds `part` bits to each code. May write up to 7 codes after the last. */
INLINE void KERNEL(unpack_part)(const uint8_t *restrict packed, size_t width, int part, int shift,
                                uint8_t *restrict codes)
{
    size_t plane = plane_bytes(width, (size_t)part);
    uint8_t mask = (uint8_t)((1 << part) - 1);
    for (int place = 0; place < 8 / part; place++) {
        uint8_t *restrict to = codes + (size_t)place * plane;
        for (size_t j = 0; j < plane; j++) {
            uint8_t code = (uint8_t)(((packed[j] >> (place * part)) & mask) << shift);
            to[j] = shift ? (uint8_t)(to[j] | code) : code;
        }
    }
}

static TARGET void KERNEL(decode_uniform)(const struct decoding *job)
{
    size_t width = job->width, row_bytes = packed_bytes(width, job->bits);
    int32_t middle = 1 << (job->bits - 1);
    float scales[LANES], offsets[LANES];
    for (size_t row = 0; row < job->count; row++) {
        if (row % LANES == 0) {
            size_t count = job->count - row < LANES ? job->count - row : LANES;
            KERNEL(parameters_of)(job->scale + row, job->scale + row, count, 0x7FFF, scales);
            if (job->offset)
                KERNEL(parameters_of)(job->scale + row, job->offset + row, count, 0xFFFF, offsets);
        }
        const uint8_t *packed = job->codes + row * row_bytes, *codes = job->scratch;
        if (job->bits == 8)
            codes = packed;
        else if (job->bits == 4)
            KERNEL(unpack_part)(packed, width, 4, 0, job->scratch);
        else
            KERNEL(unpack_part)(packed, width, 2, 0, job->scratch);
        if (job->bits == 3)
            KERNEL(unpack_part)(packed + plane_bytes(width, 2), width, 1, 2, job->scratch);
        float scale = scales[row % LANES], offset = job->offset ? offsets[row % LANES] : 0;
        float *out = job->out + row * width;
        size_t column = 0;
        for (; column + LANES <= width; column += LANES) {
            bytes part;
            memcpy(&part, codes + column, sizeof part);
            floats x = __builtin_convertvector(__builtin_convertvector(part, ints) - middle, floats) * scale;
            if (job->offset) /* -0.0 + 0.0 would be 0.0. */
                x += offset;
            memcpy(out + column, &x, sizeof x);
        }
        for (; column < width; column++) {
            float x = (float)((int32_t)codes[column] - middle) * scale;
            out[column] = job->offset ? x + offset : x;
        }
    }
}

static TARGET void KERNEL(widen_halves)(const uint16_t *patterns, size_t count, float *out)
{
    size_t at = 0;
    for (; at + LANES <= count; at += LANES) {
        halves part;
        memcpy(&part, patterns + at, sizeof part);
        floats x = KERNEL(widened)(FLOAT16, part);
        memcpy(out + at, &x, sizeof x);
    }
    for (; at < count; at++)
        out[at] = KERNEL(widened)(FLOAT16, (halves){patterns[at]})[0];
}

/* ---- Rows: gather ---- */

/* Copies of a constant size compile to a few vector moves. */
static inline TARGET void KERNEL(copy_row)(char *out, const char *row, size_t row_bytes)
{
    size_t at = 0;
    for (; at + 64 <= row_bytes; at += 64)
        memcpy(out + at, row + at, 64);
    if (row_bytes - at >= 32) {
        memcpy(out + at, row + at, 32);
        at += 32;
    }
    if (row_bytes - at >= 16) {
        memcpy(out + at, row + at, 16);
        at += 16;
    }
    for (; at + 4 <= row_bytes; at += 4)
        memcpy(out + at, row + at, 4);
    for (; at < row_bytes; at++)
        out[at] = row[at];
}

/* Writes past the caches, which would otherwise first read the memory to be overwritten. */
INLINE void KERNEL(stream_row)(char *out, const char *row, size_t row_bytes)
{
    for (size_t at = 0; at < row_bytes; at += 64)
#if LANES == 16
        _mm512_stream_si512((__m512i *)(out + at), _mm512_loadu_si512(row + at));
#elif defined(__x86_64__)
        for (size_t part = at; part < at + 64; part += 16)
            _mm_stream_si128((__m128i *)(out + part), _mm_loadu_si128((const __m128i *)(row + part)));
#else
        memcpy(out + at, row + at, 64);
#endif
}

/* `first` is the index of the first row of `source`. */
static TARGET void KERNEL(gather)(const char *source, size_t row_bytes, int64_t first, const int64_t *rows,
                                  size_t count, int stream, char *out)
{
    for (size_t i = 0; i < count; i++) {
        if (i + GATHER_AHEAD < count) {
            const char *next = source + (size_t)(rows[i + GATHER_AHEAD] - first) * row_bytes;
            for (size_t at = 0; at < row_bytes && at < 512; at += 64)
                __builtin_prefetch(next + at);
        }
        const char *row = source + (size_t)(rows[i] - first) * row_bytes;
        if (stream)
            KERNEL(stream_row)(out + i * row_bytes, row, row_bytes);
        else
            KERNEL(copy_row)(out + i * row_bytes, row, row_bytes);
    }
#if defined(__x86_64__)
    if (stream)
        _mm_sfence();
#endif
}

/* Copies row `positions[i]` of the source, or row `i` without positions, to row `rows[i] - first`. */
INLINE void KERNEL(scatter_rows)(const char *source, size_t row_bytes, const int64_t *positions,
                                 const int64_t *rows, size_t count, int64_t first, int stream, char *out)
{
    for (size_t i = 0; i < count; i++) {
        if (!stream && i + GATHER_AHEAD < count) {
            char *next = out + ((size_t)rows[i + GATHER_AHEAD] - (size_t)first) * row_bytes;
            for (size_t at = 0; at < row_bytes && at < 512; at += 64)
                __builtin_prefetch(next + at, 1);
        }
        const char *row = source + (positions ? (size_t)positions[i] : i) * row_bytes;
        char *to = out + ((size_t)rows[i] - (size_t)first) * row_bytes;
        if (stream)
            KERNEL(stream_row)(to, row, row_bytes);
        else
            KERNEL(copy_row)(to, row, row_bytes);
    }
#if defined(__x86_64__)
    if (stream)
        _mm_sfence();
#endif
}

static TARGET void KERNEL(scatter)(const char *source, size_t row_bytes, const int64_t *positions,
                                   const int64_t *rows, size_t count, int64_t first, int stream, char *out)
{
    /* Elements are twice as fast with a constant size. */
    if (row_bytes == 1)
        KERNEL(scatter_rows)(source, 1, positions, rows, count, first, 0, out);
    else if (row_bytes == 2)
        KERNEL(scatter_rows)(source, 2, positions, rows, count, first, 0, out);
    else if (row_bytes == 4)
        KERNEL(scatter_rows)(source, 4, positions, rows, count, first, 0, out);
    else if (row_bytes == 8)
        KERNEL(scatter_rows)(source, 8, positions, rows, count, first, 0, out);
    else
        KERNEL(scatter_rows)(source, row_bytes, positions, rows, count, first, stream, out);
}

/* ---- Rows: scan of stamps ---- */

/* Writes the indices of stamps above the clock, counted from `first`, to `out`, which has room for all. */
static TARGET size_t KERNEL(scan)(const int32_t *stamps, size_t count, int32_t clock, int64_t first,
                                  int64_t *out)
{
    size_t found = 0, at = 0;
#if LANES == 16
    __m512i now = _mm512_set1_epi32(clock), step = _mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0);
    for (; at + 16 <= count; at += 16) {
        unsigned above = _mm512_cmpgt_epi32_mask(_mm512_loadu_si512(stamps + at), now);
        if (!above)
            continue;
        /* Whole vectors are stored: at most `at` indices precede them. */
        for (int half = 0; half < 16; half += 8, above >>= 8) {
            __m512i index = _mm512_add_epi64(step, _mm512_set1_epi64(first + (int64_t)at + half));
            _mm512_storeu_si512(out + found, _mm512_maskz_compress_epi64((__mmask8)above, index));
            found += (size_t)__builtin_popcount(above & 0xFF);
        }
    }
#elif LANES == 8
    __m256i now = _mm256_set1_epi32(clock);
    for (; at + 32 <= count; at += 32) {
        uint64_t above = 0;
        for (unsigned part = 0; part < 32; part += 8) {
            __m256i some = _mm256_loadu_si256((const __m256i *)(stamps + at + part));
            above |= (uint64_t)_mm256_movemask_ps((__m256)_mm256_cmpgt_epi32(some, now)) << part;
        }
        /* Four are stored without a branch: at most `at` indices precede them. */
        size_t stop = found + (size_t)__builtin_popcountll(above);
        do {
            for (int i = 0; i < 4; i++, above &= above - 1)
                out[found++] = first + (int64_t)at + __builtin_ctzll(above | 1ull << 32);
        } while (above);
        found = stop;
    }
#endif
    while (at < count) {
        size_t stop = count - at < 64 ? count : at + 64;
        int any = 0;
        for (size_t i = at; i < stop; i++)
            any |= stamps[i] > clock;
        for (; any && at < stop; at++) {
            out[found] = first + (int64_t)at;
            found += stamps[at] > clock;
        }
        at = stop;
    }
    return found;
}

/* ---- Blocks ---- */

static inline TARGET void KERNEL(widen)(int type, const void *from, float *to)
{
    const uint16_t *half = from;
    if (type == FLOAT32)
        memcpy(to, from, BLOCK * sizeof(float));
    else if (type == BFLOAT16)
        for (int i = 0; i < BLOCK; i++)
            to[i] = of_bfloat16(half[i]);
    else
        for (int i = 0; i < BLOCK; i++)
            to[i] = of_float16(half[i]);
}

/* Rounds to nearest even, in a 16-bit type. */
static inline TARGET void KERNEL(narrow)(int type, const float *from, uint16_t *to)
{
    if (type == BFLOAT16)
        for (int i = 0; i < BLOCK; i++)
            to[i] = to_bfloat16(from[i]);
    else
        for (int i = 0; i < BLOCK; i++)
            to[i] = to_float16(from[i]);
}

/* The greatest magnitude of a block, as a pattern. */
static inline TARGET uint32_t KERNEL(greatest)(const float *values)
{
    uint32_t most = 0;
    for (int i = 0; i < BLOCK; i++) {
        uint32_t found = magnitude(values[i]);
        most = found > most ? found : most;
    }
    return most;
}

/* Adds 128 sums, which are overwritten, in an order that is the same for all vector lengths. */
static inline TARGET float KERNEL(add_halves)(float *sums)
{
    for (int i = 0; i < 64; i++)
        sums[i] += sums[i + 64];
    for (int i = 0; i < 32; i++)
        sums[i] += sums[i + 32];
    for (int i = 0; i < 16; i++)
        sums[i] += sums[i + 16];
    float rest[4];
    for (int i = 0; i < 4; i++)
        rest[i] = (sums[i] + sums[i + 8]) + (sums[i + 4] + sums[i + 12]);
    return (rest[0] + rest[2]) + (rest[1] + rest[3]);
}

/* Whether no square can have underflowed or overflowed in a float32 sum. */
static inline int KERNEL(is_sure)(float sum)
{
    return sum > 0x1p-60f && sum < 0x1p120f;
}

/* The sum of the squares of the finite differences of two blocks. */
static __attribute__((noinline)) TARGET double KERNEL(exact_squares)(const float *values, const float *others)
{
    float lost[BLOCK];
    double found = 0;
    for (int i = 0; i < BLOCK; i++)
        lost[i] = values[i] - others[i];
    if (!KERNEL(greatest)(lost))
        return 0;
    for (int i = 0; i < BLOCK; i++) {
        double value = magnitude(lost[i]) < INFINITE ? lost[i] : 0;
        found += value * value;
    }
    return found;
}

/* The sum of the squares of the finite values of a block. */
static inline TARGET double KERNEL(squares)(const float *values)
{
    static const float zeros[BLOCK];
    float sums[BLOCK / 2];
    for (int i = 0; i < BLOCK / 2; i++)
        sums[i] = values[i] * values[i] + values[i + BLOCK / 2] * values[i + BLOCK / 2];
    float sum = KERNEL(add_halves)(sums);
    return KERNEL(is_sure)(sum) ? sum : KERNEL(exact_squares)(values, zeros);
}

/* Compares the first elements at once: an optimizer step nearly always changes them. */
static inline TARGET int KERNEL(differ)(const void *block, const void *other, size_t nbytes)
{
    const uint64_t *words = block, *others = other;
    uint64_t found = 0;
    for (size_t i = 0; i < 8; i++)
        found |= words[i] ^ others[i];
    for (size_t i = 8; !found && i < nbytes / 8; i += 8)
        for (size_t j = i; j < i + 8; j++)
            found |= words[j] ^ others[j];
    return found != 0;
}

/* Copies a block past the cache, so that it does not evict blocks that are still to be read. */
static inline TARGET void KERNEL(stream)(const void *block, char *out, size_t nbytes, int past_cache)
{
#if defined(__x86_64__)
    if (past_cache) {
        for (size_t at = 0; at < nbytes; at += 16)
            _mm_stream_si128((__m128i *)(out + at), _mm_loadu_si128((const __m128i *)((const char *)block + at)));
        return;
    }
#endif
    (void)past_cache;
    memcpy(out, block, nbytes);
}

/*
 * Writes a decoded block, and adds its squared error. Returns 0, and writes nothing, if a value is
 * not finite in the block's type.
 */
INLINE int KERNEL(finish)(struct block_encoding *one, int type, const float *values, const float *decoded,
                          char *out)
{
    float sums[BLOCK / 2], wide[BLOCK];
    uint16_t narrow[BLOCK];
    for (int i = 0; i < BLOCK / 2; i++) {
        const int j = i + BLOCK / 2;
        float low = decoded[i], high = decoded[j];
        if (type == BFLOAT16) {
            low = of_bfloat16(narrow[i] = to_bfloat16(low));
            high = of_bfloat16(narrow[j] = to_bfloat16(high));
        } else if (type == FLOAT16) {
            low = of_float16(narrow[i] = to_float16(low));
            high = of_float16(narrow[j] = to_float16(high));
        }
        low = values[i] - low;
        high = values[j] - high;
        sums[i] = low * low + high * high;
    }
    const void *block = type == FLOAT32 ? (const void *)decoded : narrow;
    double sum = KERNEL(add_halves)(sums);
    if (!KERNEL(is_sure)((float)sum)) {
        if (type != FLOAT32)
            KERNEL(widen)(type, narrow, wide);
        if (type == FLOAT16 && KERNEL(greatest)(wide) >= INFINITE)
            return 0;
        sum = KERNEL(exact_squares)(values, type == FLOAT32 ? decoded : wide);
    }
    KERNEL(stream)(block, out, BLOCK * (type == FLOAT32 ? 4 : 2), one->past_cache);
    one->squared_error += sum;
    return 1;
}

/* Encodes a block with a scale; see `codecs.uniform`. Returns 0 if it cannot. */
INLINE int KERNEL(encode_linear)(struct block_encoding *one, int type, int bits, int relative,
                                 const float *values, const char *before, char *out)
{
    const int middle = 1 << (bits - 1);
    float wide[BLOCK], change[BLOCK];
    const float *reference = wide;
    if (relative && type == FLOAT32)
        reference = (const float *)before;
    else if (relative)
        KERNEL(widen)(type, before, wide);
    uint32_t most = 0;
    for (int i = 0; i < BLOCK; i++) {
        change[i] = relative ? values[i] - reference[i] : values[i];
        most = magnitude(change[i]) > most ? magnitude(change[i]) : most;
    }
    float greatest = float_of(most);
    if (most && !(greatest >= 0x1p-80f && greatest <= 0x1p48f))
        return 0;
    float scale = greatest / (float)(middle - 1);
    int is_half = (float)middle * scale < 0x1p15f && (scale >= 0x1p-16f || scale == 0);
    uint16_t stored = is_half ? to_float16(scale) : to_bfloat16(scale);
    float rounded = is_half ? of_float16(stored) : of_bfloat16(stored);
    float inverse = rounded > 0 ? 1 / rounded : 0;
    uint8_t *packed = one->codes + one->coded * (size_t)(BLOCK * bits / 8);
    for (int i = 0; i < BLOCK / 2; i++) {
        /* The lowest bits of each sum are the rounded value. */
        const int j = i + BLOCK / 2;
        float low = change[i] * inverse + ROUND, high = change[j] * inverse + ROUND;
        uint32_t low_code = bits_of(low) + (uint32_t)middle, high_code = bits_of(high) + (uint32_t)middle;
        if (bits == 4) {
            packed[i] = (uint8_t)((low_code & 15) | high_code << 4);
        } else {
            packed[i] = (uint8_t)low_code;
            packed[j] = (uint8_t)high_code;
        }
        low = (low - ROUND) * rounded;
        high = (high - ROUND) * rounded;
        change[i] = relative ? low + reference[i] : low;
        change[j] = relative ? high + reference[j] : high;
    }
    one->words[one->coded] = is_half ? stored : stored | FLAG_BFLOAT16;
    return KERNEL(finish)(one, type, values, change, out);
}

/*
 * The base-2 logarithm of a positive normal number, in points of the grid: `whole` plus the returned
 * value, to 0.0003. Numpy computes the same bits in `save.encode_blocks`.
 */
INLINE float KERNEL(logarithm)(uint32_t bits, int32_t *whole)
{
    int32_t distance = (int32_t)(bits - ROOT_HALF);
    float rest = float_of((uint32_t)(distance & 0x7fffff) + ROOT_HALF) - 1;
    *whole = (distance >> 23) * POINTS_PER_OCTAVE;
    float sum = -0x1.a71976p+4f;
    sum = sum * rest + 0x1.49e2fep+5f;
    sum = sum * rest + -0x1.784f52p+5f;
    sum = sum * rest + 0x1.eada34p+5f;
    sum = sum * rest + -0x1.713832p+6f;
    sum = sum * rest + 0x1.7155acp+7f;
    return sum * rest;
}

/* See `logarithm`; the number may be subnormal. */
INLINE float KERNEL(any_logarithm)(uint32_t bits, int32_t *whole)
{
    uint32_t scaled = bits_of((float)(int32_t)bits);
    int is_normal = bits >= NORMAL;
    float found = KERNEL(logarithm)(is_normal ? bits : scaled, whole);
    *whole += is_normal ? 0 : LOWEST_POWER * POINTS_PER_OCTAVE;
    return found;
}

/* Decodes a block of log8; `table` has elements of the block's type. */
static inline TARGET void KERNEL(look_up_points)(int type, const void *table, const uint8_t *codes,
                                                 unsigned first, unsigned step, void *out)
{
    uint16_t at = (uint16_t)(first - step);
    if (type == FLOAT32)
        for (int i = 0; i < BLOCK; i++) {
            uint32_t found = ((const uint32_t *)table)[(uint16_t)(at + codes[i] * step)];
            ((uint32_t *)out)[i] = codes[i] ? found : 0;
        }
    else
        for (int i = 0; i < BLOCK; i++) {
            uint16_t found = ((const uint16_t *)table)[(uint16_t)(at + codes[i] * step)];
            ((uint16_t *)out)[i] = codes[i] ? found : 0;
        }
}

/* Encodes a block as points of the grid; see `codecs.logarithms`. Returns 0 if it cannot. */
INLINE int KERNEL(encode_log8)(struct block_encoding *one, int type, const float *values, char *out)
{
    uint32_t most = 0, least = UINT32_MAX;
    for (int i = 0; i < BLOCK; i++) {
        uint32_t bits = bits_of(values[i]), positive = bits - 1; /* Zero wraps to the greatest. */
        most = bits > most ? bits : most;
        least = positive < least ? positive : least;
    }
    if (most >= INFINITE)
        return 0;
    most = most ? most : 1;
    least = least + 1 ? least + 1 : 1;
    int32_t low, high;
    float low_rest = KERNEL(any_logarithm)(least, &low), high_rest = KERNEL(any_logarithm)(most, &high);
    int32_t first = low + (int32_t)__builtin_floorf(low_rest + SLACK);
    int32_t last = high + (int32_t)__builtin_ceilf(high_rest - SLACK);
    int32_t step = (last - first + CODES - 1) / CODES;
    step = step > 1 ? step : 1;
    float inverse = 1 / (float)step;
    uint8_t *codes = one->codes + one->coded * BLOCK;
    uint32_t wide[BLOCK];
    for (int i = 0; i < BLOCK; i++) {
        int32_t whole;
        float rest = least < NORMAL ? KERNEL(any_logarithm)(bits_of(values[i]), &whole)
                                    : KERNEL(logarithm)(bits_of(values[i]), &whole);
        float place = (float)(whole - first) + rest;
        uint32_t code = bits_of(place * inverse + 1 + ROUND);
        wide[i] = values[i] == 0 ? 0 : code;
    }
    for (int i = 0; i < BLOCK; i++)
        codes[i] = (uint8_t)wide[i];
    first -= LOWEST_POWER * POINTS_PER_OCTAVE;
    one->words[one->coded] = (uint16_t)first;
    one->steps[one->coded] = (uint8_t)step;
    float decoded[BLOCK];
    if (type == FLOAT32) {
        KERNEL(look_up_points)(type, one->table, codes, (unsigned)first, (unsigned)step, decoded);
    } else {
        uint16_t narrow[BLOCK];
        KERNEL(look_up_points)(type, one->table, codes, (unsigned)first, (unsigned)step, narrow);
        KERNEL(widen)(type, narrow, decoded);
    }
    return KERNEL(finish)(one, type, values, decoded, out);
}

/* Multiplies a block by the factors of its codes. */
static inline TARGET void KERNEL(look_up_factors)(const float *factors, const uint8_t *packed, float *values)
{
    for (int i = 0; i < BLOCK / 2; i++) {
        values[i] *= factors[packed[i] & 15];
        values[i + BLOCK / 2] *= factors[packed[i] >> 4];
    }
}

/* Encodes a block as moves on the grid; see `codecs.logarithms`. Returns 0 if it cannot. */
INLINE int KERNEL(encode_log4)(struct block_encoding *one, int type, const float *values, const char *before,
                               char *out)
{
    float reference[BLOCK], moves[BLOCK];
    uint32_t codes[BLOCK], wrong = 0;
    KERNEL(widen)(type, before, reference);
    uint32_t range = one->high - one->low;
    for (int i = 0; i < BLOCK; i++) {
        uint32_t bits = bits_of(values[i]), other = bits_of(reference[i]);
        wrong |= bits && bits - one->low > range;
        wrong |= other && other - one->low > range;
    }
    if (wrong)
        return 0;
    for (int i = 0; i < BLOCK; i++) {
        int32_t whole;
        float rest = KERNEL(logarithm)(bits_of(values[i] / reference[i]), &whole);
        moves[i] = values[i] == 0 ? 0 : (float)whole + rest;
    }
    float furthest = float_of(KERNEL(greatest)(moves));
    float step = __builtin_ceilf((furthest - SLACK) / FURTHEST);
    step = step > 1 ? step : 1;
    if (!(step <= WIDEST_STEP)) /* An element that was zero has moved by infinity. */
        return 0;
    float inverse = 1 / step;
    for (int i = 0; i < BLOCK; i++) {
        uint32_t code = bits_of(moves[i] * inverse + ROUND) + MIDDLE;
        codes[i] = values[i] == 0 ? 0 : code;
    }
    uint8_t *packed = one->codes + one->coded * (BLOCK / 2);
    for (int i = 0; i < BLOCK / 2; i++)
        packed[i] = (uint8_t)((codes[i] & 15) | codes[i + BLOCK / 2] << 4);
    one->steps[one->coded] = (uint8_t)step;
    KERNEL(look_up_factors)((const float *)one->table + (size_t)step * 16, packed, reference);
    return KERNEL(finish)(one, type, values, reference, out);
}

INLINE void KERNEL(encode_all)(struct block_encoding *one, int codec, int type)
{
    const size_t nbytes = BLOCK * (type == FLOAT32 ? 4 : 2);
    float wide[BLOCK];
    for (size_t i = 0; i < one->count; i++) {
        const char *now = one->now + i * nbytes, *before = one->before ? one->before + i * nbytes : NULL;
        char *out = one->out + i * nbytes;
        const float *values = wide;
        int is_coded = 0;
        if (type == FLOAT32)
            values = (const float *)now;
        else
            KERNEL(widen)(type, now, wide);
        one->squared_norm += KERNEL(squares)(values);
        if (before && !KERNEL(differ)(now, before, nbytes)) {
            one->states[i] = UNCHANGED;
            memcpy(out, before, nbytes);
            continue;
        }
        if (codec == LOG8)
            is_coded = KERNEL(encode_log8)(one, type, values, out);
        else if (codec == LOG4)
            is_coded = KERNEL(encode_log4)(one, type, values, before, out);
        else if (codec == CHANGE4)
            is_coded = KERNEL(encode_linear)(one, type, 4, 1, values, before, out);
        else if (codec == CHANGE8)
            is_coded = KERNEL(encode_linear)(one, type, 8, 1, values, before, out);
        else
            is_coded = KERNEL(encode_linear)(one, type, 8, 0, values, before, out);
        one->coded += (size_t)is_coded;
        one->states[i] = is_coded ? CODED : LEFT;
        if (!is_coded)
            memcpy(out, now, nbytes);
    }
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

/* Compiles a function for each codec and type. */
#define CASE(function, codec_, type_)         \
    case codec_ * TYPES + type_:              \
        KERNEL(function)(one, codec_, type_); \
        break;
#define TYPE_CASES(function, codec_) \
    CASE(function, codec_, FLOAT32) CASE(function, codec_, BFLOAT16) CASE(function, codec_, FLOAT16)
#define CASES(function)                                               \
    switch (one->codec * TYPES + one->type) {                         \
        TYPE_CASES(function, ALONE8) TYPE_CASES(function, CHANGE4)    \
        TYPE_CASES(function, CHANGE8) TYPE_CASES(function, LOG8)      \
        TYPE_CASES(function, LOG4)                                    \
    }

static TARGET void KERNEL(encode_blocks)(struct block_encoding *one)
{
    one->coded = 0;
    one->squared_error = one->squared_norm = 0;
    CASES(encode_all)
}

INLINE void KERNEL(decode_all)(const struct block_decoding *one, int codec, int type)
{
    const int bits = codec == CHANGE4 || codec == LOG4 ? 4 : 8;
    const size_t nbytes = BLOCK * (type == FLOAT32 ? 4 : 2);
    float wide[BLOCK];
    uint8_t unpacked[BLOCK];
    for (size_t i = 0; i < one->count; i++) {
        char *data = one->data + (one->rows ? (size_t)one->rows[i] : one->first + i) * nbytes;
        const uint8_t *codes = one->codes + i * (size_t)(BLOCK * bits / 8);
        if (codec == LOG8) {
            KERNEL(look_up_points)(type, one->table, codes, one->words[i], one->steps[i], data);
            continue;
        }
        float *values = type == FLOAT32 ? (float *)data : wide;
        if (codec == LOG4) {
            if (type != FLOAT32)
                KERNEL(widen)(type, data, values);
            KERNEL(look_up_factors)((const float *)one->table + one->steps[i] * 16, codes, values);
        } else {
            uint16_t word = one->words[i];
            float scale = word & FLAG_BFLOAT16 ? of_bfloat16(word & 0x7fff) : of_float16(word);
            if (bits == 4) {
                for (int j = 0; j < BLOCK / 2; j++) {
                    unpacked[j] = codes[j] & 15;
                    unpacked[j + BLOCK / 2] = codes[j] >> 4;
                }
                codes = unpacked;
            }
            if (codec == CHANGE4 || codec == CHANGE8) {
                if (type != FLOAT32)
                    KERNEL(widen)(type, data, values);
                for (int j = 0; j < BLOCK; j++)
                    values[j] += (float)(codes[j] - (1 << (bits - 1))) * scale;
            } else {
                for (int j = 0; j < BLOCK; j++)
                    values[j] = (float)(codes[j] - (1 << (bits - 1))) * scale;
            }
        }
        if (type != FLOAT32)
            KERNEL(narrow)(type, values, (uint16_t *)data);
    }
}

static TARGET void KERNEL(decode_blocks)(const struct block_decoding *one)
{
    CASES(decode_all)
}
#undef CASES
#undef TYPE_CASES
#undef CASE

/*
 * Finds the positions of about `PLACES` changes, from block `*next` on. Repeats the last position
 * after them, for prefetches.
 *
 * Most blocks have few changes: eight positions are written without a branch.
 */
static inline TARGET size_t KERNEL(find_places)(const struct sparse *one, size_t *next, const uint8_t *at,
                                                size_t *places)
{
    size_t found = 0, i = *next;
    for (; i < one->count && found < PLACES - BLOCK; i++) {
        size_t first = (one->rows ? (size_t)one->rows[i] : one->first + i) * BLOCK;
        for (size_t j = 0; j < 8; j++)
            places[found + j] = first;
        for (size_t j = 8; j < one->counts[i]; j++)
            places[found + j] = first;
        found += one->counts[i];
    }
    for (size_t j = 0; j < found; j++)
        places[j] += at[j];
    for (size_t j = 0; j < SPARSE_AHEAD; j++)
        places[found + j] = found ? places[found - 1] : 0;
    *next = i;
    return found;
}

/* Defines functions for elements of `bits` bits. */
#define SPARSE(bits)                                                                                       \
    static TARGET void KERNEL(encode_sparse##bits)(struct sparse_encoding *one)                            \
    {                                                                                                      \
        uint8_t changed[BLOCK];                                                                            \
        for (size_t i = 0; i < one->count; i++) {                                                          \
            const uint##bits##_t *now = (const uint##bits##_t *)one->now + i * BLOCK;                      \
            const uint##bits##_t *before = (const uint##bits##_t *)one->before + i * BLOCK;                \
            unsigned found = 0;                                                                            \
            for (int j = 0; j < BLOCK; j++) {                                                              \
                changed[j] = now[j] != before[j];                                                          \
                found += changed[j];                                                                       \
            }                                                                                              \
            if (!found || found > one->most) {                                                             \
                one->states[i] = found ? LEFT : UNCHANGED;                                                 \
                continue;                                                                                  \
            }                                                                                              \
            one->states[i] = CODED;                                                                        \
            one->counts[one->coded++] = (uint16_t)found;                                                   \
            for (unsigned first = 0; first < BLOCK; first += 8) {                                          \
                uint64_t word;                                                                             \
                memcpy(&word, changed + first, sizeof(word));                                              \
                for (; word; word &= word - 1) {                                                           \
                    unsigned at = first + FIRST_BYTE(word);                                                \
                    one->at[one->elements] = (uint8_t)at;                                                  \
                    ((uint##bits##_t *)one->changes)[one->elements++] = now[at] ^ before[at];              \
                }                                                                                          \
            }                                                                                              \
        }                                                                                                  \
    }                                                                                                      \
    static TARGET int KERNEL(apply_sparse##bits)(const struct sparse *one)                                 \
    {                                                                                                      \
        uint##bits##_t *data = (uint##bits##_t *)one->data;                                                \
        const uint##bits##_t *changes = (const uint##bits##_t *)one->changes;                              \
        size_t places[PLACES + BLOCK], next = 0, i = 0;                                                    \
        for (const uint8_t *at = one->at; i < one->count;) {                                               \
            size_t found = KERNEL(find_places)(one, &i, at, places);                                       \
            int ascends = !found || places[0] >= next;                                                     \
            for (size_t j = 1; j < found; j++)                                                             \
                ascends &= places[j] > places[j - 1];                                                      \
            if (!ascends)                                                                                  \
                return 0;                                                                                  \
            next = found ? places[found - 1] + 1 : next;                                                   \
            for (size_t j = 0; j < found; j++) {                                                           \
                __builtin_prefetch(data + places[j + SPARSE_AHEAD], 1);                                    \
                data[places[j]] ^= changes[j];                                                             \
            }                                                                                              \
            at += found;                                                                                   \
            changes += found;                                                                              \
        }                                                                                                  \
        return 1;                                                                                          \
    }
SPARSE(8)
SPARSE(16)
SPARSE(32)
SPARSE(64)
#undef SPARSE

static TARGET void KERNEL(encode_sparse)(struct sparse_encoding *one)
{
    one->coded = one->elements = 0;
    if (one->itemsize == 1)
        KERNEL(encode_sparse8)(one);
    else if (one->itemsize == 2)
        KERNEL(encode_sparse16)(one);
    else if (one->itemsize == 4)
        KERNEL(encode_sparse32)(one);
    else
        KERNEL(encode_sparse64)(one);
}

static TARGET int KERNEL(apply_sparse)(const struct sparse *one)
{
    if (one->itemsize == 1)
        return KERNEL(apply_sparse8)(one);
    if (one->itemsize == 2)
        return KERNEL(apply_sparse16)(one);
    if (one->itemsize == 4)
        return KERNEL(apply_sparse32)(one);
    return KERNEL(apply_sparse64)(one);
}

/* ---- The table of this instruction set ---- */

#define TEXT_(text) #text
#define TEXT(text) TEXT_(text)
static const struct kernels KERNEL(table) = {
    .name = &TEXT(KERNEL())[1], /* Without the underscore. */
    .gather = KERNEL(gather),
    .scatter = KERNEL(scatter),
    .scan = KERNEL(scan),
    .encode_uniform = KERNEL(encode_uniform),
    .encode_shorter = KERNEL(encode_shorter),
    .decode_uniform = KERNEL(decode_uniform),
    .widen_halves = KERNEL(widen_halves),
    .encode_blocks = KERNEL(encode_blocks),
    .decode_blocks = KERNEL(decode_blocks),
    .encode_sparse = KERNEL(encode_sparse),
    .apply_sparse = KERNEL(apply_sparse),
};
#undef TEXT
#undef TEXT_

#undef INLINE
#undef PARTS
#undef bytes
#undef chunk
#undef floats
#undef halves
#undef ints
#undef levels
#undef parameters
#undef ranges
#undef rounded

#endif /* TARGET */
