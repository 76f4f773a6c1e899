// Drives the Python-free headers under the sanitizers, each against an obvious loop.
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "megaindex/bijection.hpp"
#include "megaindex/blending.hpp"
#include "megaindex/divisor.hpp"
#include "megaindex/epoch.hpp"
#include "megaindex/least_seen.hpp"
#include "megaindex/mapping.hpp"
#include "megaindex/mt19937.hpp"
#include "megaindex/receipt.hpp"
#include "megaindex/sample_index.hpp"
#include "megaindex/shuffle.hpp"

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

int64_t below(int64_t n) { return static_cast<int64_t>(random_words() % static_cast<uint64_t>(n)); }

template <class T>
void drive_shuffle() {
  for (const int64_t size : {0, 1, 2, 3, 1000, 8191, 8193, 131'073, 140'000}) {
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
    uint32_t state[2][Mt19937::kStateWords];
    first.save(state[0]);
    third.save(state[1]);
    check(std::equal(state[0], state[0] + Mt19937::kStateWords, state[1]), "state after shuffle");
  }
  std::vector<uint64_t> positions(300);
  Mt19937 rng(1);
  rng.draw_positions((uint64_t{1} << 32) + 100, 300, positions.data());
  for (size_t k = 0; k < positions.size(); ++k) {
    check(positions[k] <= (uint64_t{1} << 32) + 100 - k, "wide position");
  }
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

    std::vector<int64_t> sizes(static_cast<size_t>(n));
    int64_t total = 0;
    for (auto& each : sizes) total += each = below(40);
    drawn.resize(static_cast<size_t>(total));
    samples.resize(static_cast<size_t>(total));
    std::fill(counts.begin(), counts.end(), 0);
    blend_exhaustive(sizes.data(), n, 0, total, counts.data(), drawn.data(), samples.data());
    check(counts == sizes, "exhaustive counts");

    std::vector<uint64_t> shares(static_cast<size_t>(n));
    for (auto& share : shares) share = random_words() >> (11 + below(40));
    shares[0] += 1;
    std::vector<int64_t> filled(static_cast<size_t>(n)), at(static_cast<size_t>(n));
    drawn.resize(static_cast<size_t>(size));
    samples.resize(static_cast<size_t>(size));
    divisor_fill(shares.data(), n, 0, size, filled.data(), drawn.data(), samples.data());
    divisor_counts(shares.data(), n, size, at.data());
    check(filled == at, "divisor counts");
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
    for (size_t k = 0; k + 2 < rows.size(); k += 3) {
      check(rows[k] < rows[k + 1] && rows[k + 1] <= sizes.size(), "mapped sentences");
    }
    for (size_t k = 0; k + 3 < wide.size(); k += 4) {
      check(wide[k] < wide[k + 1] && wide[k + 2] < static_cast<uint64_t>(documents), "mapped block");
    }
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
    uint64_t sum[2] = {0, 0};
    receipt_add(positions.data(), samples, spans, keys, together.data(), sum);
    __extension__ unsigned __int128 total = 0;
    for (size_t k = 0; k < rows.size(); k += 2) {
      __extension__ const unsigned __int128 high = rows[k];
      total += (high << 64) + rows[k + 1];
    }
    check(sum[0] == static_cast<uint64_t>(total >> 64) && sum[1] == static_cast<uint64_t>(total),
          "receipt");
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
    const Bijection order(key, size);
    int64_t position = 0;
    for (int64_t p = 0; p < size; ++p) {
      if (p % stride == 0) check(starts[static_cast<size_t>(p / stride)] == position, "epoch start");
      position += lengths[static_cast<size_t>(order.at(p) % documents)];
    }
    check(starts.back() == position, "tokens of a pass");
    if (position == 0) continue;
    const int64_t begins[3] = {0, position / 2, position - 1}, ends[3] = {1, position, position};
    EpochSpans spans;
    epoch_spans(pass, stride, starts.data(), static_cast<int64_t>(starts.size()), begins, ends, 3, spans);
    for (size_t k = 0; k < 3; ++k) {
      int64_t tokens = 0;
      for (auto run = static_cast<size_t>(spans.row_splits[k]);
           run < static_cast<size_t>(spans.row_splits[k + 1]); ++run) {
        tokens += spans.lengths[run];
        check(spans.offsets[run] + spans.lengths[run] <=
                  lengths[static_cast<size_t>(spans.documents[run])], "run within its document");
      }
      check(tokens == ends[k] - begins[k], "tokens of a request");
    }
  }
}

}  // namespace

int main() {
  drive_bijection<int32_t>();
  drive_bijection<int64_t>();
  drive_epoch();
  drive_shuffle<int32_t>();
  drive_shuffle<uint32_t>();
  drive_shuffle<int64_t>();
  drive_samples<int32_t>();
  drive_samples<int64_t>();
  drive_blending<int16_t>();
  drive_blending<uint8_t>();
  drive_mapping();
  drive_receipts();
  drive_least_seen();
  std::printf("sanitize: %lld checks of the headers passed\n", static_cast<long long>(checks));
}
