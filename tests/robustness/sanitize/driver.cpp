// Drives the Python-free headers under the sanitizers, each against an obvious loop.
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "megaindex/balance.hpp"
#include "megaindex/bijection.hpp"
#include "megaindex/blended_spans.hpp"
#include "megaindex/blending.hpp"
#include "megaindex/divisor.hpp"
#include "megaindex/epoch.hpp"
#include "megaindex/gather.hpp"
#include "megaindex/epoch_spans.hpp"
#include "megaindex/least_seen.hpp"
#include "megaindex/mapping.hpp"
#include "megaindex/masks.hpp"
#include "megaindex/mt19937.hpp"
#include "megaindex/packed_spans.hpp"
#include "megaindex/packing.hpp"
#include "megaindex/parallel.hpp"
#include "megaindex/pieces.hpp"
#include "megaindex/receipt.hpp"
#include "megaindex/row_keys.hpp"
#include "megaindex/sample_index.hpp"
#include "megaindex/shuffle.hpp"
#include "megaindex/spans.hpp"
#include "megaindex/windows.hpp"

using namespace megaindex;

namespace {

int64_t checks = 0;

void check(bool fine, const char* what) {
  ++checks;
  if (fine) return;
  std::fprintf(stderr, "wrong: %s\n", what);
  std::exit(1);
}

std::mt19937_64 random_words(20260101);

// FNV-1a of what the kernels wrote, printed at the end: equal on every processor. Only a standard
// library shuffles differently, so that builds with the same one are compared.
uint64_t digest = 0xcbf29ce484222325;

template <class T>
void record(const std::vector<T>& written) {
  const auto* bytes = reinterpret_cast<const unsigned char*>(written.data());
  for (size_t k = 0; k < written.size() * sizeof(T); ++k) digest = (digest ^ bytes[k]) * 0x100000001b3;
}

int64_t below(int64_t n) { return static_cast<int64_t>(random_words() % static_cast<uint64_t>(n)); }

template <class T>
void drive_shuffle() {
  for (const int64_t size : {0, 1, 2, 3, 1000, 8191, 8193, 140'000, 2'100'000}) {
    std::vector<T> once(static_cast<size_t>(size)), again(once), plain(once);
    Mt19937 first(7), second(7), third(7);
    shuffled_range(first, 0, size, once.data(), 1);
    shuffled_range(second, 0, size, again.data(), 3);
    for (int64_t i = 0; i < size; ++i) plain[static_cast<size_t>(i)] = static_cast<T>(i);
    for (int64_t i = size - 1; i > 0; --i) {
      uint32_t mask = static_cast<uint32_t>(i), word;
      for (int s = 1; s < 32; s <<= 1) mask |= mask >> s;
      do word = third.next32() & mask;
      while (word > static_cast<uint64_t>(i));
      std::swap(plain[static_cast<size_t>(i)], plain[word]);
    }
    check(once == again && once == plain, "shuffle");
    record(once);
    uint32_t state[2][Mt19937::kStateWords];
    first.save(state[0]);
    third.save(state[1]);
    check(std::equal(state[0], state[0] + Mt19937::kStateWords, state[1]), "state after shuffle");
    bool stopped = false;
    try {
      shuffle(first, once.data(), size, 3, [] { throw 0; });
    } catch (int) {
      stopped = true;
    }
    check(stopped == (size >= kWorthThreads), "a shuffle is stopped by its poll");
  }
  std::vector<uint64_t> positions(300);
  Mt19937 rng(1), plain(1);
  const uint64_t first = (uint64_t{1} << 32) + 100;  // the steps cross the limit of 32-bit words
  rng.draw_positions(first, 300, positions.data());
  for (uint64_t k = 0; k < positions.size(); ++k) {
    const bool wide = first - k > UINT32_MAX;
    uint64_t word;
    do word = wide ? plain.next64() & ((uint64_t{1} << 33) - 1) : plain.next32();
    while (word > first - k);
    check(positions[k] == word, "wide position");
  }
  record(positions);
}

template <class T>
void drive_samples() {
  for (int round = 0; round < 60; ++round) {
    const int64_t sequences = 1 + below(2000), documents = 1 + below(round < 50 ? 4000 : 300'000);
    const int64_t longest = 1 + below(round % 3 ? 50 : 5000), S = 1 + below(300);
    // at an odd address, as in an .idx file
    std::vector<unsigned char> bytes(static_cast<size_t>(4 * sequences + 2));
    std::vector<int32_t> ids(static_cast<size_t>(documents)), lengths(static_cast<size_t>(sequences));
    for (auto& length : lengths) length = static_cast<int32_t>(below(longest));
    std::memcpy(bytes.data() + 2, lengths.data(), 4 * lengths.size());
    for (auto& id : ids) id = static_cast<int32_t>(below(sequences));
    int64_t tokens = 0;
    for (const auto id : ids) tokens += lengths[static_cast<size_t>(id)];
    for (const int64_t extra : {0, 1}) {
      const int64_t samples = std::max<int64_t>(0, tokens - extra) / S;
      const SampleGeometry g{S, extra, samples, tokens};
      std::vector<uint16_t> room(static_cast<size_t>(sequences));
      std::vector<T> rows(static_cast<size_t>(2 * samples + 2)), other(rows);
      const int threads = 1 + static_cast<int>(below(4));
      cut_samples(bytes.data() + 2, sequences, ids.data(), documents, g, threads, nullptr, rows.data());
      cut_samples(bytes.data() + 2, sequences, ids.data(), documents, g, 1, room.data(), other.data());
      check(rows == other, "short lengths");
      record(rows);
      int64_t position = 0, row = 1;
      for (int64_t d = 0; d < documents; ++d) {
        const int64_t end = position + lengths[static_cast<size_t>(ids[static_cast<size_t>(d)])];
        for (; row <= samples && row * S - 1 + extra < end; ++row) {
          const auto at = static_cast<size_t>(2 * row);
          check(rows[at] == d && rows[at + 1] == row * S - position, "sample row");
        }
        position = end;
      }
      check(row == samples + 1, "number of rows");
    }
  }
}

template <class Index>
void drive_blending() {
  for (int round = 0; round < 40; ++round) {
    const int64_t n = 1 + below(round % 4 ? 20 : 250), size = 1 + below(4000);
    std::vector<double> weights(static_cast<size_t>(n));
    for (auto& weight : weights) {
      weight = round % 3 == 0 ? 1.0 / static_cast<double>(n) : static_cast<double>(below(1000)) / 1e3;
      if (round % 3 == 1) weight = 1.0 + static_cast<double>(below(5)) * 1e-15;
    }
    std::vector<int64_t> counts(static_cast<size_t>(n)), plain(counts), samples(static_cast<size_t>(size));
    std::vector<Index> drawn(static_cast<size_t>(size));
    const int64_t middle = below(size + 1);  // stop and go on
    blend_greedy(weights.data(), n, 0, middle, counts.data(), drawn.data(), samples.data());
    blend_greedy(weights.data(), n, middle, size, counts.data(), drawn.data() + middle,
                 samples.data() + middle);
    for (int64_t k = 0; k < size; ++k) {
      size_t best = 0;
      double most = 0;
      for (size_t i = 0; i < weights.size(); ++i) {
        const double behind = weights[i] * static_cast<double>(std::max<int64_t>(k, 1)) -
                              static_cast<double>(plain[i]);
        if (i == 0 || behind > most) most = behind, best = i;
      }
      check(drawn[static_cast<size_t>(k)] == static_cast<Index>(best), "greedy draw");
      check(samples[static_cast<size_t>(k)] == plain[best]++, "greedy sample");
    }
    check(counts == plain, "greedy counts");
    record(drawn);
    record(samples);

    std::vector<int64_t> sizes(static_cast<size_t>(n));
    int64_t total = 0;
    for (auto& each : sizes) total += each = below(40);
    drawn.resize(static_cast<size_t>(total));
    samples.resize(static_cast<size_t>(total));
    std::fill(counts.begin(), counts.end(), 0);
    blend_exhaustive(sizes.data(), n, 0, total, counts.data(), drawn.data(), samples.data());
    check(counts == sizes, "exhaustive counts");
    record(drawn);
    record(samples);

    std::vector<uint64_t> shares(static_cast<size_t>(n));
    for (auto& share : shares) share = random_words() >> (11 + below(40));
    shares[0] += 1;
    std::vector<int64_t> filled(static_cast<size_t>(n)), at(static_cast<size_t>(n));
    drawn.resize(static_cast<size_t>(size));
    samples.resize(static_cast<size_t>(size));
    divisor_fill(shares.data(), n, 0, size, filled.data(), drawn.data(), samples.data());
    divisor_counts(shares.data(), n, size, at.data());
    check(filled == at, "divisor counts");
    record(drawn);
    record(samples);
  }
}

void drive_mapping() {
  for (int round = 0; round < 40; ++round) {
    const int64_t documents = 1 + below(60);
    std::vector<int64_t> docs{0};
    for (int64_t d = 0; d < documents; ++d) docs.push_back(docs.back() + below(9));
    std::vector<int32_t> sizes(static_cast<size_t>(docs.back())), titles(static_cast<size_t>(documents));
    for (auto& each : sizes) each = static_cast<int32_t>(below(round % 2 ? 60 : 600));
    for (auto& each : titles) each = static_cast<int32_t>(below(9));
    const MappingArgs args{docs.data(), documents, sizes.data(), 1 + below(3), below(500), 128, 5, 2};
    Mapping<SentenceMapping> sentences(args, round % 3 ? 0.1 : 0.0);
    std::vector<uint32_t> rows(static_cast<size_t>(3 * sentences.count()));
    sentences.fill(rows.data());
    Mapping<BlockMapping> blocks(args, titles.data());
    std::vector<uint64_t> wide(static_cast<size_t>(4 * blocks.count()));
    blocks.fill(wide.data());
    record(rows);
    record(wide);
    for (size_t k = 0; k + 2 < rows.size(); k += 3) {
      check(rows[k] < rows[k + 1] && rows[k + 1] <= sizes.size(), "mapped sentences");
    }
    for (size_t k = 0; k + 3 < wide.size(); k += 4) {
      check(wide[k] < wide[k + 1] && wide[k + 2] < static_cast<uint64_t>(documents), "mapped block");
    }
  }
}

void drive_packing() {
  for (int round = 0; round < 200; ++round) {
    const int64_t documents = below(60), capacity = 1 + below(40), most = below(30);
    std::vector<int32_t> lengths;
    for (int64_t d = 0; d < documents; ++d) lengths.push_back(static_cast<int32_t>(below(50)));
    std::vector<int64_t> begins(static_cast<size_t>(most));
    const Packed packed = pack_documents(lengths.data(), documents, capacity, 0, most, begins.data());
    check(packed.samples <= most, "samples begun");
    record(begins);
    for (int64_t k = 0; k + 1 < packed.samples; ++k) {
      const int64_t begin = begins[static_cast<size_t>(k)], end = begins[static_cast<size_t>(k) + 1];
      int64_t tokens = 0;
      for (int64_t d = begin; d < end; ++d) tokens += lengths[static_cast<size_t>(d)];
      check(begin < end && (tokens <= capacity || end == begin + 1), "documents that fit");
    }
  }
}

void drive_balance() {
  for (int round = 0; round < 60; ++round) {
    const int64_t ranks = 1 + below(6), size = 1 + below(4), stride = ranks * size;
    const int64_t rows = stride * below(5), before = stride * below(4);
    const int64_t served = below(before + 1), samples = served + below(rows + 1);
    std::vector<int64_t> work(static_cast<size_t>(samples)), out(static_cast<size_t>(rows), -7);
    for (int64_t& each : work) each = below(30);
    balance_rows(work.data(), samples, served, before, ranks, size, rows, out.data());
    std::vector<int> seen(static_cast<size_t>(samples));
    for (const int64_t number : out) {
      check(-1 <= number && number < samples, "a sample, or padding");
      if (number >= 0) ++seen[static_cast<size_t>(number)];
    }
    const int64_t times = std::count(seen.begin(), seen.end(), 1);
    check(rows == 0 || times == samples - served, "every sample once");
    std::vector<int64_t> splits{0}, lengths, sums(static_cast<size_t>(samples));
    for (int64_t k = 0; k < samples; ++k) {
      for (int64_t r = below(4); r > 0; --r) lengths.push_back(below(20));
      splits.push_back(static_cast<int64_t>(lengths.size()));
    }
    squared_lengths(lengths.data(), splits.data(), samples, 16, sums.data());
    for (const int64_t sum : sums) check(0 <= sum && sum <= 16 * 16, "squares of the input");
  }
}

void drive_least_seen() {
  for (int round = 0; round < 40; ++round) {
    const int64_t samples = below(60), segments = 1 + below(80);
    std::vector<int64_t> begins, ends, splits{0}, widths, counts;
    for (int64_t s = 0; s < segments; ++s) {
      widths.push_back(1 + below(9));
      counts.push_back(below(3));
    }
    for (int64_t k = 0; k < samples; ++k) {
      for (int64_t r = below(4); r > 0; --r) {
        begins.push_back(below(segments));
        ends.push_back(std::min(segments, begins.back() + below(6)));
      }
      splits.push_back(static_cast<int64_t>(begins.size()));
    }
    std::vector<int64_t> order(static_cast<size_t>(samples)), plain(counts);
    const SegmentRuns runs{begins.data(), ends.data(), splits.data(), samples};
    least_seen(runs, widths.data(), counts.data(), samples, order.data());
    std::vector<bool> taken(static_cast<size_t>(samples));
    for (const int64_t chosen : order) {
      std::pair<int64_t, int64_t> best{INT64_MAX, -1};
      for (int64_t k = 0; k < samples; ++k) {
        int64_t score = 0;
        for (auto r = static_cast<size_t>(splits[static_cast<size_t>(k)]);
             r < static_cast<size_t>(splits[static_cast<size_t>(k) + 1]); ++r) {
          for (auto s = static_cast<size_t>(begins[r]); s < static_cast<size_t>(ends[r]); ++s) {
            score += plain[s] * widths[s];
          }
        }
        if (!taken[static_cast<size_t>(k)]) best = std::min(best, {score, k});
      }
      check(chosen == best.second, "least seen");
      taken[static_cast<size_t>(chosen)] = true;
      for (auto r = static_cast<size_t>(splits[static_cast<size_t>(chosen)]);
           r < static_cast<size_t>(splits[static_cast<size_t>(chosen) + 1]); ++r) {
        for (auto s = static_cast<size_t>(begins[r]); s < static_cast<size_t>(ends[r]); ++s) ++plain[s];
      }
    }
    check(counts == plain, "counts after least seen");
    record(order);
  }
}

void drive_receipts() {
  for (int round = 0; round < 40; ++round) {
    const int64_t samples = below(50);
    std::vector<int64_t> positions, splits{0}, parts[3];
    std::vector<int32_t> source;
    for (int64_t k = 0; k < samples; ++k) {
      positions.push_back(below(INT64_MAX));
      splits.push_back(splits.back() + 1 + below(4));
    }
    for (int64_t k = 0; k < splits.back(); ++k) {
      source.push_back(static_cast<int32_t>(below(2)));
      for (auto& part : parts) part.push_back(below(INT64_MAX));
    }
    const uint64_t keys[4] = {random_words(), random_words(), random_words(), random_words()};
    const ReceiptSpans spans{source.data(), parts[0].data(), parts[1].data(), parts[2].data(),
                             splits.data()};
    std::vector<int64_t> apart, together(static_cast<size_t>(samples));
    for (int64_t k = 0; k < samples; ++k) apart.push_back(k);
    std::vector<uint64_t> rows(static_cast<size_t>(2 * samples));
    receipt_add(positions.data(), samples, spans, keys, apart.data(), rows.data());
    record(rows);
    uint64_t sum[2] = {0, 0};
    receipt_add(positions.data(), samples, spans, keys, together.data(), sum);
    __extension__ unsigned __int128 total = 0;
    for (size_t k = 0; k < rows.size(); k += 2) {
      __extension__ const unsigned __int128 high = rows[k];
      total += (high << 64) + rows[k + 1];
    }
    check(sum[0] == static_cast<uint64_t>(total >> 64) && sum[1] == static_cast<uint64_t>(total),
          "receipt");
    std::vector<int32_t> exposures(static_cast<size_t>(samples)), sources(exposures);
    std::vector<int64_t> row(static_cast<size_t>(samples)), high(row), same(row), at(row);
    const int64_t width = below(INT64_MAX), starts[2] = {0, below(INT64_MAX)}, passes[2] = {3, 0};
    const RowPasses of{positions.data(), starts, passes, 2};
    const RowKeys wide{at.data(), sources.data(), exposures.data(), row.data(), high.data()};
    const RowKeys narrow{at.data(), sources.data(), exposures.data(), same.data(), nullptr};
    row_keys(positions.data(), spans, samples, width, keys, of, wide);
    row_keys(positions.data(), spans, samples, width, keys, of, narrow);
    check(row == same, "row keys");
    record(row);
    record(high);
  }
}

// Vectors against single indices, and each of them back.
template <class T>
void drive_bijection() {
  for (const int64_t n : {0, 1, 2, 100, 4095, 4096, 4097, 5000, 65'537, 1 << 20}) {
    const uint64_t key[2] = {random_words(), random_words()};
    const Bijection bijection(key, n);
    const int64_t begin = n / 3, count = std::min<int64_t>(n - begin, 5000);
    std::vector<T> there(static_cast<size_t>(count)), back(there);
    bijection.range(begin, count, there.data());
    bijection.inverse_range(begin, count, back.data());
    record(there);
    for (int64_t k = 0; k < count; ++k) {
      const auto at = static_cast<size_t>(k);
      check(0 <= there[at] && there[at] < n && there[at] == bijection.at(begin + k), "bijection");
      check(bijection.invert(there[at]) == begin + k, "inverse");
      check(back[at] == bijection.invert(begin + k), "inverse range");
    }
  }
  const uint64_t key[2] = {1, 2};
  const Bijection widest(key, kBijectionMost);
  int64_t last[40];
  widest.range(kBijectionMost - 40, 40, last);
  for (int64_t k = 0; k < 40; ++k) check(widest.invert(last[k]) == kBijectionMost - 40 + k, "widest");
}

// Each request holds as many tokens as it asks for, within their documents.
void check_runs(const Runs& runs, const int64_t* splits, const int64_t* begins, const int64_t* ends,
                int64_t requests, const std::vector<int32_t>& lengths) {
  check(splits[0] == 0 && splits[requests] == runs.size(), "runs of all requests");
  for (int64_t k = 0; k < requests; ++k) {
    int64_t tokens = 0;
    for (auto run = static_cast<size_t>(splits[k]); run < static_cast<size_t>(splits[k + 1]); ++run) {
      tokens += runs.lengths[run];
      check(runs.offsets[run] >= 0 && runs.offsets[run] + runs.lengths[run] <=
                lengths[static_cast<size_t>(runs.documents[run])], "run within its document");
    }
    check(tokens == ends[k] - begins[k], "tokens of a request");
  }
}

// Samples of three arrays and windows of a file, in order and scattered; then damaged arrays.
template <class Shuffle, class Cell>
void drive_spans() {
  for (int round = 0; round < 30; ++round) {
    const int64_t documents = 1 + below(500), S = 1 + below(round % 2 ? 9 : 300);
    std::vector<int32_t> ids(static_cast<size_t>(documents)), lengths(ids);
    std::vector<unsigned char> sizes(static_cast<size_t>(4 * documents + 2)), pointers(
        static_cast<size_t>(8 * documents + 2));
    std::vector<int64_t> begin_of;
    int64_t tokens = 0;
    for (size_t d = 0; d < ids.size(); ++d) {
      ids[d] = static_cast<int32_t>(d);
      lengths[d] = static_cast<int32_t>(below(20));
      begin_of.push_back(2 * tokens);
      tokens += lengths[d];
    }
    std::shuffle(ids.begin(), ids.end(), random_words);
    std::memcpy(sizes.data() + 2, lengths.data(), 4 * lengths.size());
    std::memcpy(pointers.data() + 2, begin_of.data(), 8 * begin_of.size());
    const int64_t samples = std::max<int64_t>(0, tokens - 1) / S;
    if (samples == 0) continue;
    std::vector<Cell> rows(static_cast<size_t>(2 * samples + 2));
    cut_samples(sizes.data() + 2, documents, ids.data(), documents,
                SampleGeometry{S, 1, samples, tokens}, 1, nullptr, rows.data());
    std::vector<Shuffle> shuffle;
    std::vector<int64_t> asked, begins, ends, splits(static_cast<size_t>(3 * samples + 1));
    for (int64_t k = 0; k < samples; ++k) shuffle.push_back(static_cast<Shuffle>(k));
    for (int64_t k = 0; k < 3 * samples; ++k) {
      asked.push_back(k < samples ? k : below(samples));
      begins.push_back(asked.back() * S);
      ends.push_back(begins.back() + S + 1);
    }
    const IndexArrays<Shuffle, Cell> index{shuffle.data(), samples, rows.data(), samples + 1,
                                           ids.data(), documents, {sizes.data() + 2, documents}, 1};
    const auto count = static_cast<int64_t>(asked.size());
    Runs of_arrays(1), of_windows(1);
    array_spans(index, asked.data(), count, of_arrays, splits.data());
    check_runs(of_arrays, splits.data(), begins.data(), ends.data(), count, lengths);
    const Sequences file{pointers.data() + 2, {sizes.data() + 2, documents}, 0, documents, 1};
    window_spans(file, begins.data(), ends.data(), count, of_windows, splits.data());
    check_runs(of_windows, splits.data(), begins.data(), ends.data(), count, lengths);
    for (int damage = 0; damage < 40; ++damage) {
      std::vector<Cell> damaged(rows);
      damaged[static_cast<size_t>(below(2 * samples + 2))] = static_cast<Cell>(random_words());
      auto other = index;
      other.samples = damaged.data();
      Runs runs(1);
      try {
        array_spans(other, asked.data(), count, runs, splits.data());
      } catch (const InvalidInput&) {
      }
      for (int64_t k = 0; k < runs.size(); ++k) {
        const auto at = static_cast<size_t>(k);
        check(runs.offsets[at] >= 0 && runs.offsets[at] + runs.lengths[at] <=
                  lengths[static_cast<size_t>(runs.documents[at])], "run of a damaged array");
      }
    }
  }
}

void drive_epoch() {
  for (const int64_t documents : {1, 50, 3000, 400'000}) {
    std::vector<unsigned char> bytes(static_cast<size_t>(4 * documents + 2));
    std::vector<int32_t> lengths(static_cast<size_t>(documents));
    for (auto& length : lengths) length = static_cast<int32_t>(below(9));
    std::memcpy(bytes.data() + 2, lengths.data(), 4 * lengths.size());
    const int64_t copies = 1 + below(2), stride = 1 + below(70), size = copies * documents;
    const uint64_t key[2] = {random_words(), random_words()};
    const PermutedDocuments pass({bytes.data() + 2, documents}, copies, key);
    std::vector<int64_t> starts(static_cast<size_t>((size + stride - 1) / stride + 1)), again(starts);
    epoch_starts(pass, stride, 1, starts.data());
    epoch_starts(pass, stride, 3, again.data());
    check(starts == again, "epoch starts with threads");
    record(starts);
    const Bijection order(key, size);
    int64_t position = 0;
    for (int64_t p = 0; p < size; ++p) {
      if (p % stride == 0) check(starts[static_cast<size_t>(p / stride)] == position, "epoch start");
      position += lengths[static_cast<size_t>(order.at(p) % documents)];
    }
    check(starts.back() == position, "tokens of a pass");
    if (position == 0) continue;
    const int64_t begins[3] = {0, position / 2, position - 1}, ends[3] = {1, position, position};
    Runs runs(1);
    int64_t splits[4];
    epoch_spans(pass, stride, starts.data(), begins, ends, 3, runs, splits);
    check_runs(runs, splits, begins, ends, 3, lengths);
  }
}

// Batches whose every cell is a new allocation's, from files at odd addresses.
template <class Token, class Out>
void drive_gather(TokenType type, int itemsize_log2) {
  for (int round = 0; round < 60; ++round) {
    const int64_t sequences = 1 + below(9), rows = below(6), width = below(round % 9 ? 90 : 200'000);
    std::vector<int32_t> lengths;
    std::vector<int64_t> pointers;
    std::vector<Token> tokens;
    for (int64_t s = 0; s < sequences; ++s) {
      pointers.push_back(static_cast<int64_t>(tokens.size() * sizeof(Token)));
      lengths.push_back(static_cast<int32_t>(below(round % 9 ? 70 : 90'000)));
      for (int32_t i = 0; i < lengths.back(); ++i) tokens.push_back(static_cast<Token>(below(100)));
    }
    std::vector<unsigned char> idx(static_cast<size_t>(12 * sequences + 1));
    std::memcpy(idx.data() + 1, pointers.data(), 8 * pointers.size());
    std::memcpy(idx.data() + 1 + 8 * sequences, lengths.data(), 4 * lengths.size());
    const std::vector<TokenSource> sources{
        {reinterpret_cast<const unsigned char*>(tokens.data()),
         static_cast<int64_t>(tokens.size() * sizeof(Token)), type, itemsize_log2, idx.data() + 1,
         idx.data() + 1 + 8 * sequences, sequences}};
    std::vector<int64_t> document, offset, length, splits{0};
    for (int64_t k = 0; k < rows; ++k) {
      for (int64_t r = below(5); r > 0; --r) {
        document.push_back(below(sequences));
        const int64_t size = lengths[static_cast<size_t>(document.back())];
        offset.push_back(below(size + 1));
        length.push_back(below(size - offset.back() + 1));
      }
      splits.push_back(static_cast<int64_t>(document.size()));
    }
    std::vector<int32_t> source(document.size());
    const TokenRuns runs{source.data(), document.data(), offset.data(), length.data(), splits.data(),
                         rows};
    std::vector<Out> out(static_cast<size_t>(rows * width)), labels(out);
    const int threads = 1 + static_cast<int>(below(4));
    check(gather<Out>(sources, runs, width, Out{77}, threads, {out.data(), width},
                      {labels.data(), width}) == -1, "gather takes good runs");
    record(out);
    record(labels);
    for (int64_t k = 0; k < rows; ++k) {
      std::vector<Out> text;
      for (auto r = static_cast<size_t>(splits[static_cast<size_t>(k)]);
           r < static_cast<size_t>(splits[static_cast<size_t>(k) + 1]); ++r) {
        const Token* from = tokens.data() + pointers[static_cast<size_t>(document[r])] /
                                                static_cast<int64_t>(sizeof(Token)) + offset[r];
        for (int64_t i = 0; i < length[r]; ++i) text.push_back(static_cast<Out>(from[i]));
      }
      text.resize(std::max(text.size(), static_cast<size_t>(width) + 1), Out{77});
      const auto row = static_cast<ptrdiff_t>(k * width);
      check(std::equal(out.begin() + row, out.begin() + row + width, text.begin()), "row");
      check(std::equal(labels.begin() + row, labels.begin() + row + width, text.begin() + 1),
            "labels");
    }
    if (document.empty()) continue;
    const auto bad = static_cast<size_t>(below(static_cast<int64_t>(document.size())));
    length[bad] = INT64_MAX - below(3);
    check(gather<Out>(sources, runs, width, Out{}, 1, {out.data(), width}, {nullptr, 0}) ==
              static_cast<int64_t>(bad), "gather names the bad run");
  }
}

template <class Token>
void drive_masks() {
  for (int round = 0; round < 60; ++round) {
    const int64_t rows = below(4), width = 1 + below(300);
    const auto cells = static_cast<size_t>(rows * width);
    std::vector<Token> tokens(cells), labels(cells);
    for (auto& token : tokens) token = static_cast<Token>(below(round % 2 ? 5 : 300));
    for (auto& label : labels) label = static_cast<Token>(below(5));
    std::vector<float> loss(cells);
    std::vector<int64_t> positions(cells), lengths, splits{0};
    std::vector<int32_t> starts(static_cast<size_t>(rows * (width + 1))), longest(static_cast<size_t>(rows));
    const DocumentFields fields{{positions.data(), width}, {starts.data(), width + 1}, longest.data()};
    documents_by_token<Token>(rows, width, {tokens.data(), width}, 3, fields);
    for (int64_t k = 0; k < rows; ++k) {
      for (int64_t begin = 0, j = 0; j < width; ++j) {
        const auto at = static_cast<size_t>(k * width + j);
        check(positions[at] == j - begin, "position");
        if (tokens[at] == 3) begin = j + 1;
      }
      for (int64_t r = below(5); r > 0; --r) lengths.push_back(below(width));
      splits.push_back(static_cast<int64_t>(lengths.size()));
    }
    record(positions);
    documents_by_run(lengths.data(), splits.data(), rows, width, fields);
    record(starts);
    for (int64_t k = 0; k < rows; ++k) {
      check(starts[static_cast<size_t>(k * (width + 1))] == 0 &&
                starts[static_cast<size_t>(k * (width + 1) + width)] == width, "first and last start");
    }
    const auto reads = tokens, wants = labels;
    mask_loss<Token>({2, round % 3 == 0, 3}, rows, width, {tokens.data(), width},
                     {labels.data(), width}, {loss.data(), width});
    record(loss);
    record(tokens);
    for (size_t i = 0; i < cells; ++i) {
      const bool masked = wants[i] == 2 || (round % 3 == 0 && reads[i] == 3);
      check(loss[i] == (masked ? 0.0F : 1.0F), "loss mask");
      check(tokens[i] == (reads[i] == 2 ? 0 : reads[i]), "padding of tokens");
      check(labels[i] == (wants[i] == 2 ? 0 : wants[i]), "padding of labels");
    }
  }
}

// Two sources of documents of 5 tokens, read in samples of 4: sample k begins at token 4 * k.
void drive_blended_spans() {
  std::vector<int32_t> documents{2, 0, 1}, lengths{5, 5, 5}, narrow{0, 0, 0, 4, 1, 3, 2, 2};
  std::vector<int64_t> wide(narrow.begin(), narrow.end()), shuffle{2, 0, 1};
  std::vector<uint32_t> short_shuffle{0, 2, 1};
  const detail::FileLengths sizes{reinterpret_cast<const unsigned char*>(lengths.data()), 3};
  const std::vector<AnyIndexArrays> indices{
      IndexArrays<uint32_t, int32_t>{short_shuffle.data(), 3, narrow.data(), 4, documents.data(), 3,
                                     sizes, 1},
      IndexArrays<int64_t, int64_t>{shuffle.data(), 3, wide.data(), 4, documents.data(), 3, sizes,
                                    1}};
  std::vector<int64_t> which, samples;
  for (int k = 0; k < 200; ++k) which.push_back(below(2)), samples.push_back(below(3));
  std::vector<int64_t> splits(201);
  std::vector<int32_t> sources;
  Runs runs(1);
  blended_spans(indices, which.data(), samples.data(), 200, runs, sources, splits.data());
  check(static_cast<int64_t>(sources.size()) == runs.size(), "a source for each run");
  for (size_t k = 0; k < 200; ++k) {
    const auto sample = static_cast<size_t>(samples[k]);
    const int64_t row = which[k] == 0 ? static_cast<int64_t>(short_shuffle[sample]) : shuffle[sample];
    const auto first = static_cast<size_t>(splits[k]);
    int64_t tokens = 0;
    for (auto r = first; r < static_cast<size_t>(splits[k + 1]); ++r) {
      check(sources[r] == which[k], "source of a run");
      tokens += runs.lengths[r];
    }
    check(tokens == 5 && runs.documents[first] == documents[static_cast<size_t>(4 * row / 5)] &&
              runs.offsets[first] == 4 * row % 5, "sample of a blend");
  }
}

// The number of bins when each piece by itself is put where least room is left.
int64_t best_fit_decreasing(const std::vector<int64_t>& counts, int64_t capacity, int64_t most) {
  std::vector<std::pair<int64_t, int64_t>> bins;  // room, pieces
  for (int64_t length = capacity; length > 0; --length) {
    for (int64_t k = 0; k < counts[static_cast<size_t>(length)]; ++k) {
      auto best = bins.end();
      for (auto bin = bins.begin(); bin != bins.end(); ++bin) {
        if (bin->first < length || (most > 0 && bin->second == most)) continue;
        if (best == bins.end() || *bin < *best) best = bin;
      }
      if (best == bins.end()) best = bins.insert(bins.end(), {capacity, 0});
      best->first -= length;
      ++best->second;
    }
  }
  return static_cast<int64_t>(bins.size());
}

void drive_pieces() {
  for (const int64_t capacity : {1, 2, 3, 9, 1000, 4096, 4097, 1 << 24}) {
    const Cutter cut(capacity, LongDocuments::kSplit);
    const int64_t most = INT32_MAX, last = most - most % capacity;
    for (const int64_t length : {last - 1, last, most, most / 2, most / 2 + 1}) {
      const Pieces found = cut(length);
      check(found.samples == length / capacity && found.rest == length % capacity,
            "pieces of the longest documents");
    }
  }
  for (const int64_t capacity : {2, 64, 65, 66, 4160, 4161, 4162}) {  // words of a set of rooms
    std::vector<int64_t> counts(static_cast<size_t>(capacity + 1));
    counts[1] = 1;  // leaves the most room
    check(pack_pieces(counts.data(), capacity, 0, 1, true).layers.size() == 1, "one short piece");
  }
  for (int round = 0; round < 60; ++round) {
    const bool large = round % 20 == 0;  // several threads, and lengths of 4096 pieces and more
    const int64_t documents = large ? 200'000 : below(300);
    const int64_t capacity = large ? 24 + below(20) : 1 + below(40), most = below(3) * below(9);
    const auto rule = static_cast<LongDocuments>(below(3));
    std::vector<int32_t> sizes(static_cast<size_t>(documents));
    for (auto& size : sizes) size = static_cast<int32_t>(below(below(9) ? 30 : 400));
    // at an odd address, as in an .idx file
    std::vector<unsigned char> bytes(4 * sizes.size() + 3);
    if (documents > 0) std::memcpy(bytes.data() + 3, sizes.data(), 4 * sizes.size());
    const detail::FileLengths lengths{bytes.data() + 3, documents};
    const Cutter cut(capacity, rule);
    std::vector<int64_t> counts(static_cast<size_t>(capacity + 1)), again(counts);
    count_pieces(lengths, cut, 1, counts.data());
    count_pieces(lengths, cut, 3, again.data());
    check(counts == again, "pieces counted by threads");
    std::vector<int64_t> starts(counts.size()), expected(sizes.size());
    for (size_t l = 0; l + 1 < counts.size(); ++l) starts[l + 1] = starts[l] + counts[l];
    std::vector<int32_t> sorted(static_cast<size_t>(starts.back())), other(sorted);
    std::vector<int64_t> whole(static_cast<size_t>((documents + 63) / 64 + 1)), others(whole);
    sort_pieces(lengths, cut, counts.data(), 1, sorted.data(), whole.data());
    sort_pieces(lengths, cut, counts.data(), 3, other.data(), others.data());
    check(sorted == other && whole == others, "pieces sorted by threads");
    const auto packed = pack_pieces(counts.data(), capacity, most, 1, true);
    const int64_t bins = packed.runs.back().first;
    if (!large) check(bins == best_fit_decreasing(counts, capacity, most), "number of bins");
    const uint64_t key[2] = {random_words(), random_words()};
    const PackedArrays arrays{key, lengths, rule, 1, starts.data(), capacity, sorted.data(),
                              static_cast<int64_t>(sorted.size()), whole.data(),
                              static_cast<int64_t>(whole.size()), packed.layers.data(),
                              static_cast<int64_t>(packed.layers.size()), packed.runs.data(),
                              static_cast<int64_t>(packed.runs.size()) - 1};
    std::vector<int64_t> numbers(static_cast<size_t>(bins)), splits(numbers.size() + 1);
    for (int64_t b = 0; b < bins; ++b) numbers[static_cast<size_t>(b)] = b;
    std::shuffle(numbers.begin(), numbers.end(), random_words);
    Runs runs(1);
    PackedReader(arrays).read(numbers.data(), bins, runs, splits.data());
    check(splits.back() == runs.size(), "row splits of packed bins");
    std::vector<int64_t> seen(sizes.size());
    for (size_t b = 0; b < numbers.size(); ++b) {
      int64_t room = capacity;
      for (auto i = static_cast<size_t>(splits[b]); i < static_cast<size_t>(splits[b + 1]); ++i) {
        const auto d = static_cast<size_t>(runs.documents[i]);
        const int64_t inputs = std::min(runs.lengths[i], capacity);
        check(runs.offsets[i] % capacity == 0 && runs.offsets[i] + runs.lengths[i] <= sizes[d],
              "packed span");
        seen[d] += inputs;
        room -= inputs;
      }
      check(room >= 0 && splits[b] < splits[b + 1], "room of a bin");
    }
    for (size_t d = 0; d < sizes.size(); ++d) expected[d] = cut.used(sizes[d]);
    check(seen == expected, "every token is in one bin");
    record(sorted);
    record(whole);
    record(splits);
    record(std::vector<int64_t>(runs.documents.get(), runs.documents.get() + runs.size()));
    for (PackedArrays wrong : {arrays, arrays, arrays}) {  // of another packing
      auto layers = packed.layers;
      auto table = packed.runs;
      if (layers.empty()) break;
      int64_t* fields[] = {&layers[static_cast<size_t>(below(wrong.num_layers))].below,
                           &layers[static_cast<size_t>(below(wrong.num_layers))].before,
                           &layers[static_cast<size_t>(below(wrong.num_layers))].each,
                           &layers[static_cast<size_t>(below(wrong.num_layers))].rank,
                           &layers[static_cast<size_t>(below(wrong.num_layers))].bins,
                           &table[static_cast<size_t>(below(wrong.num_runs))].layer,
                           &table[static_cast<size_t>(below(wrong.num_runs))].before};
      *fields[below(7)] = below(2) ? below(1000) - 500 : INT64_MAX >> below(40);
      wrong.layers = layers.data();
      wrong.runs = table.data();
      Runs found(1);
      try {
        PackedReader(wrong).read(numbers.data(), bins, found, splits.data());
        check(found.size() == splits.back(), "row splits of another packing");
      } catch (const InvalidInput&) {
      }
    }
  }
}

// A thread of a system that starts `left` more of them.
struct ScarceThread {
  static int64_t left;

  template <class Task>
  explicit ScarceThread(Task&& task) {
    if (left-- == 0) throw std::system_error(EAGAIN, std::generic_category());
    thread = std::thread(std::forward<Task>(task));
  }
  void join() { thread.join(); }

  std::thread thread;
};
int64_t ScarceThread::left = 0;

void drive_parallel() {
  for (int64_t count = 1; count <= 5; ++count) {
    for (int64_t startable = 0; startable < count; ++startable) {
      for (int64_t bad = 0; bad <= count; ++bad) {  // bad == count: no part throws
        ScarceThread::left = startable;
        std::vector<int> runs(static_cast<size_t>(count));
        std::vector<std::thread::id> threads(runs.size());
        int64_t thrown = count;
        try {
          run_parallel<ScarceThread>(count, [&](int64_t part) {
            ++runs[static_cast<size_t>(part)];
            threads[static_cast<size_t>(part)] = std::this_thread::get_id();
            if (part >= bad) throw part;
          });
        } catch (int64_t part) {
          thrown = part;
        }
        check(thrown == bad, "the first part's exception");
        check(runs == std::vector<int>(runs.size(), 1), "every part runs once");
        const auto here = std::count(threads.begin(), threads.end(), std::this_thread::get_id());
        check(here == count - startable, "parts without a thread run on the caller's");
      }
    }
  }
}

}  // namespace

int main() {
  drive_parallel();
  drive_blended_spans();
  drive_gather<uint8_t, int32_t>(TokenType::kU8, 0);
  drive_gather<uint16_t, int64_t>(TokenType::kU16, 1);
  drive_gather<int32_t, int64_t>(TokenType::kI32, 2);
  drive_gather<double, float>(TokenType::kF64, 3);
  drive_masks<int64_t>();
  drive_masks<int32_t>();
  drive_bijection<int32_t>();
  drive_bijection<int64_t>();
  drive_epoch();
  drive_spans<uint32_t, int32_t>();
  drive_spans<int64_t, int64_t>();
  drive_shuffle<int32_t>();
  drive_shuffle<uint32_t>();
  drive_shuffle<int64_t>();
  drive_samples<int32_t>();
  drive_samples<int64_t>();
  drive_blending<int16_t>();
  drive_blending<uint8_t>();
  drive_mapping();
  drive_receipts();
  drive_packing();
  drive_pieces();
  drive_least_seen();
  drive_balance();
  std::printf("%lld checks of the headers passed; digest %016llx\n", static_cast<long long>(checks),
              static_cast<unsigned long long>(digest));
}
