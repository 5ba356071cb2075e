// Compile a loop for AVX-512, AVX2 and the baseline, and choose when the library is loaded.
#pragma once

#if defined(__x86_64__) && defined(__linux__) && defined(__GLIBC__) && defined(__GNUC__) && \
    !defined(__clang__)
#define BNUQ_CLONES __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define BNUQ_CLONES
#endif
