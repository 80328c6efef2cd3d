// Host tests are programs: EXPECT(condition, what, was, different...) counts and names what fails; main ends with
// `return finish("mask");`. A new file tests/host/test_*.cpp is built and run without being listed anywhere.
#pragma once

#include <cmath>
#include <cstdio>
#include <random>
#include <string>

#include "check.h"

namespace flash::test {

inline int passed = 0, failed = 0;

#define EXPECT(condition, ...)                                                                               \
  do {                                                                                                       \
    if (condition) {                                                                                         \
      ::flash::test::passed++;                                                                               \
    } else if (::flash::test::failed++ < 10) {                                                               \
      std::printf("%s:%d: %s: %s\n", __FILE__, __LINE__, #condition, ::flash::message(__VA_ARGS__).c_str()); \
    }                                                                                                        \
  } while (false)

// The text of the exception of type Error that `call` throws; empty if it throws none.
template <class Error, class Call>
std::string error_of(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

inline bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

inline int finish(const char* name) {
  std::printf("%s: %d checks, %d failed\n", name, passed + failed, failed);
  return failed == 0 ? 0 : 1;
}

}  // namespace flash::test
