// Runs the tests that TEST() defined, or only those whose names contain the first argument.
#include "tests/check.h"

int main(int argc, char** argv) {
  using namespace adaptive::testing;  // NOLINT: a test
  for (const auto& [name, test] : all_tests()) {
    run(name, test, argc > 1 ? argv[1] : "");
  }
  return summary();
}
