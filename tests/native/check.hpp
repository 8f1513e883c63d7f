// CHECK: a failed check prints its place and ends the program, since threads may be in any state.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <initializer_list>

#define CHECK(condition)                                                                        \
    do {                                                                                        \
        if (!(condition)) {                                                                     \
            std::fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition);      \
            std::abort();                                                                       \
        }                                                                                       \
    } while (false)

struct Case {
    const char* sentence;  // what must hold
    void (*body)();
};

inline int run_cases(std::initializer_list<Case> cases) {
    for (const Case& one : cases) {
        std::printf("%s\n", one.sentence);
        std::fflush(stdout);
        one.body();
    }
    return EXIT_SUCCESS;
}
