// NumPy's legacy random stream and shuffles.
#include "python/arrays.hpp"
#include "python/register.hpp"

#include <algorithm>
#include <array>
#include <string>

#include "megaindex/mt19937.hpp"
#include "megaindex/shuffle.hpp"

namespace megaindex::python {
namespace {

py::array_t<uint32_t> seed_state(int64_t seed) {
  require(seed >= 0 && seed <= 0xffffffffLL,
          "seed: must be from 0 to 2**32 - 1, got " + std::to_string(seed));
  py::array_t<uint32_t> state(Mt19937::kStateWords);
  Mt19937(static_cast<uint32_t>(seed)).save(state.mutable_data());
  return state;
}

// Call body(rng) without the GIL, and store the new state of the stream. The state is copied before
// it is checked: another thread may write to the array meanwhile.
template <class Body>
void with_stream(py::array& state, Body&& body) {
  uint32_t* words = output<uint32_t>(state, "state");
  const char* rule =
      "state: expected uint32[625], its last entry at most 624; make it with seed_state";
  require(state.size() == Mt19937::kStateWords, rule);
  std::array<uint32_t, Mt19937::kStateWords> copy;
  std::copy_n(words, copy.size(), copy.begin());
  require(copy[Mt19937::kWords] <= Mt19937::kWords, rule);
  py::gil_scoped_release unlocked;
  Mt19937 rng(copy.data());
  body(rng);
  rng.save(words);
}

// Call body with a pointer of the array's own integer type.
template <class Body>
void with_shuffle_array(py::array& a, const char* name, Body&& body) {
  if (is<int32_t>(a)) return body(output<int32_t>(a, name));
  if (is<uint32_t>(a)) return body(output<uint32_t>(a, name));
  body(output<int64_t>(a, name));
}

void shuffle_array(py::array& state, py::array& array, int num_threads) {
  require_no_overlap(array, "array", {state});
  with_shuffle_array(array, "array", [&](auto* x) {
    const int64_t size = array.size();
    with_stream(state, [&](Mt19937& rng) { shuffle(rng, x, size, num_threads, Signals{}); });
  });
}

void fill_shuffled_range(py::array& state, int64_t first, py::array& out, int num_threads) {
  require_no_overlap(out, "out", {state});
  with_shuffle_array(out, "out", [&](auto* x) {
    const int64_t size = out.size();
    with_stream(state, [&](Mt19937& rng) {
      shuffled_range(rng, first, size, x, num_threads, Signals{});
    });
  });
}

void fill_shuffled_documents(py::array& state, const py::object& documents, int64_t first_document,
                             int64_t num_epochs, py::array& out, int num_threads) {
  int32_t* x = output<int32_t>(out, "out");
  require_no_overlap(out, "out", {state, documents});
  require(num_epochs >= 1 && out.size() % num_epochs == 0,
          "out: must hold num_epochs equal rows, got " + std::to_string(out.size()) + " cells for " +
              std::to_string(num_epochs) + " epochs");
  const int64_t count = out.size() / num_epochs;
  const int32_t* ids = nullptr;
  if (documents.is_none()) {
    require(first_document >= 0 && first_document + count <= 0x80000000LL,
            "first_document: sequence ids must be from 0 to 2**31 - 1");
  } else {
    const auto array = as_numpy(documents);
    ids = input<int32_t>(array, "documents");
    require(array.size() == count, "documents: must have as many entries as a row of out");
  }
  const auto first = static_cast<int32_t>(first_document);
  with_stream(state, [&](Mt19937& rng) {
    shuffled_documents(rng, ids, first, count, num_epochs, x, num_threads, Signals{});
  });
}

}  // namespace

void register_shuffle(py::module_& m) {
  using namespace py::literals;
  m.def("seed_state", &seed_state, "seed"_a);
  m.def("shuffle", &shuffle_array, "state"_a, "array"_a, "num_threads"_a = 1);
  m.def("shuffled_range", &fill_shuffled_range, "state"_a, "first"_a, "out"_a, "num_threads"_a = 1);
  m.def("shuffled_documents", &fill_shuffled_documents, "state"_a, "documents"_a,
        "first_document"_a, "num_epochs"_a, "out"_a, "num_threads"_a = 1);
}

}  // namespace megaindex::python
