def test_arms_are_compared_by_their_jobs(built):
    """Synthetic jobs: 60 + seed seconds for the baseline, 90 + seed for the others, 60 steps each."""
    text = built.html.split('data-table="costs"')[1].split("</table>")[0]
    rows = [[cell.split("<")[0].strip() for cell in row.split("<td>")[1:]] for row in text.split("<tr>")[2:]]
    assert rows[0] == ["baseline", "2", "60.5 (60.0 to 61.0)", "1.01", "1.00", "54.5", "812", "12.5"]
    assert rows[1] == ["E5", "2", "90.5 (90.0 to 91.0)", "1.51", "1.50", "81.5", "812", "12.5"]
    minutes = (2 * 60.5 + 6 * 90.5) / 60
    assert f"{minutes:.1f} minutes of training and {9 * 12.5 / 60:.1f} minutes of evaluation" in built.html


def test_without_measurements_the_page_says_so(make_report, synthetic, tmp_path):
    built = make_report(tmp_path, synthetic.study(arms=["baseline"], seeds=[0], comparisons=[]), 20)
    for path in tmp_path.rglob("*.tsv"):
        path.unlink()
    html = built.build().html
    assert "No job recorded its cost." in html
    assert "incomplete" not in html.split("<main>")[1].split("<section")[0]
